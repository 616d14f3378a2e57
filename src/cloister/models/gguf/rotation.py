"""Rotary settings of a GGUF file, as fields of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import dequantized
from cloister.models.config import ConfigFields
from cloister.models.gguf.layout import Architecture
from cloister.models.gguf.tensors import find_entry
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
OF_ROPE = frozenset((ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS))


def read_rotation(file: GGUFFile, fields: ConfigFields, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Returns the fields of a config.json that stand for what the file says; none where the family turns nothing."""
    if architecture.family.learned_positions:
        return {}
    theta, local_base = _take_base(fields, "rope.freq_base", architecture.global_base), architecture.local_base
    scaling = _read_stretching(file, fields) or _read_scaling(fields)
    if scaling.get("rope_type") == "yarn":
        scaling = {**scaling, **architecture.rope, **_read_entries(fields, architecture)}
    parameters = {"rope_theta": theta, **scaling, **_read_part(fields, architecture, head_dim)}
    if local_base is not None:  # local layers are not scaled
        local = {"rope_theta": _take_base(fields, "rope.freq_base_swa", local_base or theta)}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    return {"rope_parameters": parameters}


def read_factors(file: GGUFFile, name: str, num_frequencies: int) -> npt.NDArray[np.float32]:
    """Returns a tensor that divides each frequency.

    Raises:
        ModelError: it has another length, or a number that divides nothing.
    """
    entry = find_entry(file, name)
    factors = dequantized(entry.read())
    if entry.shape != (num_frequencies,) or factors.dtype != np.float32 or not np.all((factors > 0) & np.isfinite(factors)):
        raise ModelError(f"tensor {name!r} in {file.path.name} must hold a positive F32 for each frequency")
    return factors


def _take_base(fields: ConfigFields, name: str, default: float) -> float:
    theta = fields.take(name, float, default)
    if not 1 < theta < float("inf"):
        raise ModelError(f"{name!r} in {fields.source} must be greater than 1, not {theta}", param=name)
    return theta


def _read_entries(fields: ConfigFields, architecture: Architecture) -> dict[str, float]:
    """Returns what a family's YaRN has of its own, as far as the file says it."""
    found = {entry: fields.take(entry, float, None) for entry in {entry for entry, _ in architecture.rope_entries.values()}}
    known = ((name, found[entry], factor) for name, (entry, factor) in architecture.rope_entries.items())
    return {name: value * factor for name, value, factor in known if value is not None}


def _read_part(fields: ConfigFields, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Returns how much of a head is turned."""
    size = fields.take_size("rope.dimension_count", head_dim)
    if architecture.family.partial_rotary is None:
        if size != head_dim:
            raise ModelError(
                f"'rope.dimension_count' in {fields.source} must be the size of a head ({head_dim})",
                param="rope.dimension_count",
            )
        return {}
    return {"partial_rotary_factor": (size + 0.25) / head_dim}  # a quarter more, so that rounding down gives `size` again


def _read_stretching(file: GGUFFile, fields: ConfigFields) -> dict[str, Any] | None:
    """Returns LongRoPE's factors, which lie in tensors; None where there are none."""
    if LONG_FACTORS not in file.tensors or SHORT_FACTORS not in file.tensors:
        return None
    count = file.tensors[LONG_FACTORS].shape[-1]
    fields.take_any("rope.scaling.type")
    return {
        "rope_type": "longrope",
        "long_factor": read_factors(file, LONG_FACTORS, count).tolist(),
        "short_factor": read_factors(file, SHORT_FACTORS, count).tolist(),
        "attention_factor": fields.take("rope.scaling.attn_factor", float, 1.0),
        "original_max_position_embeddings": fields.take_size("rope.scaling.original_context_length"),
    }


def _read_scaling(fields: ConfigFields) -> dict[str, Any]:
    kind = fields.take("rope.scaling.type", str, "linear")
    factor = fields.take("rope.scaling.factor", float, None) or fields.take("rope.scale_linear", float, None) or 1.0
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ModelError(
            f"rope scaling {kind!r} in {fields.source} is not supported; known: {known}", param="rope.scaling.type"
        )
    return _SCALINGS[kind](fields, factor)


def _no_scaling(_fields: ConfigFields, _factor: float) -> dict[str, Any]:
    return {}


def _linear_scaling(_fields: ConfigFields, factor: float) -> dict[str, Any]:
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn_scaling(fields: ConfigFields, factor: float) -> dict[str, Any]:
    named = {"original_max_position_embeddings": fields.take("rope.scaling.original_context_length", int, None)}
    betas = {name: fields.take(f"rope.scaling.yarn_{name}", float, None) for name in ("beta_fast", "beta_slow")}
    scale = fields.take("rope.scaling.yarn_attn_factor", float, None)
    return {"rope_type": "yarn", "factor": factor, "attention_factor": scale, **named, **betas}


_SCALINGS: Mapping[str, Callable[[ConfigFields, float], dict[str, Any]]] = {
    "none": _no_scaling,
    "linear": _linear_scaling,
    "yarn": _yarn_scaling,
}
