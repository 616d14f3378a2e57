"""Rotary frequencies from a config: plain, linear (Chen et al. 2023), YaRN (Peng et al. 2023) and Llama 3.1's scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.types.errors import ModelError

Frequencies = npt.NDArray[np.float32]
Scaled: TypeAlias = tuple[Frequencies, float]
"""Frequencies, and what multiplies cos and sin."""

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
    scaled, attention_scale = SCALINGS[name](plain, rope, context, theta)
    rope.take_any("original_max_position_embeddings")
    rope.finish()
    return RopeSpec(tuple(float(f) for f in scaled), attention_scale)


def _plain(inv_freq: Frequencies, _rope: ConfigFields, _context: int, _theta: float) -> Scaled:
    return inv_freq, 1.0


def _linear(inv_freq: Frequencies, rope: ConfigFields, _context: int, _theta: float) -> Scaled:
    return inv_freq / np.float32(_take_factor(rope)), 1.0


def _yarn(inv_freq: Frequencies, rope: ConfigFields, context: int, theta: float) -> Scaled:
    """Keeps frequencies that turn often within the original context, slows those that turn seldom by `factor`, and blends
    between (section 3.2); cos and sin grow with the logarithm of `factor` (equation 22)."""
    factor, num_pairs = _take_factor(rope), len(inv_freq)
    scale = rope.take("attention_factor", float, None) or (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    turns = rope.take("beta_fast", float, None) or 32.0, rope.take("beta_slow", float, None) or 1.0
    if min(turns) <= 0 or theta <= 1:
        raise ModelError(f"{rope.source}: YaRN needs a positive beta_fast and beta_slow, and a rope_theta above 1")
    bounds = [2 * num_pairs * math.log(context / (number * 2 * math.pi)) / (2 * math.log(theta)) for number in turns]
    if rope.take("truncate", bool, True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], 2 * num_pairs - 1)
    ramp = (np.arange(num_pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low or 0.001)
    kept = 1 - np.clip(ramp, 0, 1)
    return (inv_freq / np.float32(factor) * (1 - kept) + inv_freq * kept).astype(np.float32), scale


def _llama3(inv_freq: Frequencies, rope: ConfigFields, context: int, _theta: float) -> Scaled:
    """Slows long wavelengths by `factor`, keeps short ones, and blends between (Llama 3.1; Dubey et al. 2024)."""
    factor = np.float32(_take_factor(rope))
    low, high = rope.take("low_freq_factor", float), rope.take("high_freq_factor", float)
    if high <= low:
        raise ModelError("high_freq_factor must be greater than low_freq_factor", param="high_freq_factor")
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > context / low, inv_freq / factor, inv_freq)
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(between, blended, slowed).astype(np.float32), 1.0


def _take_factor(rope: ConfigFields) -> float:
    factor = rope.take("factor", float)
    if not 0 < factor < math.inf:
        raise ModelError(f"'factor' in {rope.source} must be positive, not {factor}", param="factor")
    return factor


SCALINGS: Mapping[str, Callable[[Frequencies, ConfigFields, int, float], Scaled]] = {
    "default": _plain,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
