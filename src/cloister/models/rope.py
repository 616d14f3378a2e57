"""Rotary frequencies from a config: plain, linear (Chen et al. 2023) and Llama 3.1's scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.types.errors import ModelError

Frequencies = npt.NDArray[np.float32]

_DEFAULT_THETA = 10000.0


def read_rope(fields: ConfigFields, head_dim: int, max_positions: int) -> RopeSpec:
    """Returns the rotary embedding that a config asks for.

    Understands both forms: `rope_theta` beside `rope_scaling`, and `rope_parameters` (transformers 5).

    Raises:
        ModelError: a kind of scaling, or a parameter of one, that is not known.
    """
    scaling, parameters = fields.take_any("rope_scaling"), fields.take_any("rope_parameters")
    theta = fields.take("rope_theta", float, _DEFAULT_THETA)
    original = fields.take("original_max_position_embeddings", int, None)
    given = scaling or parameters or {}
    if not isinstance(given, dict):
        raise ModelError("rope_scaling in config.json must be an object", param="rope_scaling")
    rope = ConfigFields(given, "rope parameters of config.json")
    theta = rope.take("rope_theta", float, theta)
    kind = rope.take("rope_type", str, None)
    legacy = rope.take("type", str, None)
    name = kind or legacy or "default"
    if name not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ModelError(f"rope type {name!r} is not supported; known types: {known}", param="rope_type")
    context = original or rope.take("original_max_position_embeddings", int, None) or max_positions
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1.0) / np.power(np.float32(theta), exponent)).astype(np.float32)
    scaled = SCALINGS[name](plain, rope, context)
    rope.take_any("original_max_position_embeddings")
    rope.finish()
    return RopeSpec(inv_freq=tuple(float(f) for f in scaled))


def _plain(inv_freq: Frequencies, _rope: ConfigFields, _context: int) -> Frequencies:
    return inv_freq


def _linear(inv_freq: Frequencies, rope: ConfigFields, _context: int) -> Frequencies:
    return inv_freq / np.float32(rope.take("factor", float))


def _llama3(inv_freq: Frequencies, rope: ConfigFields, context: int) -> Frequencies:
    """Slows long wavelengths by `factor`, keeps short ones, and blends between (Llama 3.1; Dubey et al. 2024)."""
    factor = np.float32(rope.take("factor", float))
    low, high = rope.take("low_freq_factor", float), rope.take("high_freq_factor", float)
    if high <= low:
        raise ModelError("high_freq_factor must be greater than low_freq_factor", param="high_freq_factor")
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > context / low, inv_freq / factor, inv_freq)
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(between, blended, slowed).astype(np.float32)


SCALINGS: Mapping[str, Callable[[Frequencies, ConfigFields, int], Frequencies]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
}
