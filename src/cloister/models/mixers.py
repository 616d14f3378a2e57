"""Mixers with a state from a config (`backends.spec.StateSpec`), for the families that have them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from cloister.backends.spec import Activation, Mamba2Spec
from cloister.models.config import ConfigFields
from cloister.types.errors import ModelError

LINEAR, FULL = "linear_attention", "full_attention"
"""Kinds of layers, as transformers names them in `layer_types`."""
INITIALISATION = frozenset(("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"))
"""Fields of Mamba 2 that only the first weights of a training run depend on."""
_MOST_SIZE = 65536


def take_dims(fields: ConfigFields, *names: str) -> list[int]:
    """Returns sizes of a mixer, bounded so that no damaged config asks for a huge state."""
    sizes = [fields.take_size(name) for name in names]
    for name, size in zip(names, sizes, strict=True):
        if size > _MOST_SIZE:
            stored = fields.name_of(name)
            raise ModelError(f"{stored} is {_MOST_SIZE} at most, not {size}", param=stored)
    return sizes


def take_kinds(fields: ConfigFields, num_layers: int, known: Collection[str]) -> Sequence[str] | None:
    """Returns the kind of each layer (`layer_types`); None where the config does not say.

    Raises:
        ModelError: there is not one for each layer, or one is not known.
    """
    kinds = fields.take_any("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in known for kind in kinds):
        raise ModelError(
            f"{fields.name_of('layer_types')} must list one kind for each of {num_layers} layers; known: {', '.join(known)}",
            param="layer_types",
        )
    return kinds


def take_mamba2(fields: ConfigFields, inner: int, activation: Activation, **more: Any) -> Mamba2Spec:
    """Returns the Mamba 2 mixer that a config describes under the names of Granite 4 (`Family.names` has those of others).

    `mamba_chunk_size` is taken too: it decides how a prefill is computed elsewhere, and changes no answer.

    Args:
        inner: numbers of x, which the heads cut.
        more: other fields of the spec.

    Raises:
        ModelError: a field is missing, or has no meaning.
    """
    num_heads, num_groups, d_state, kernel_size, _ = take_dims(
        fields, "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_chunk_size"
    )
    head_dim = fields.take_any("mamba_d_head")
    if inner % num_heads or head_dim not in (None, "auto", inner // num_heads):
        raise ModelError(
            f"heads must cut the {inner} numbers of a Mamba 2 layer into parts of equal size, and {num_heads} heads of "
            f"{head_dim} do not",
            param="mamba_n_heads",
        )
    if num_heads % num_groups:
        raise ModelError(f"{num_groups} groups must divide {num_heads} heads of a Mamba 2 layer", param="mamba_n_groups")
    return Mamba2Spec(
        num_heads,
        inner // num_heads,
        num_groups,
        d_state,
        kernel_size,
        activation,
        conv_bias=fields.take("mamba_conv_bias", bool, True),
        time_step_limit=_take_limits(fields),
        **more,
    )


def _take_limits(fields: ConfigFields) -> tuple[float, float]:
    given = fields.take_any("time_step_limit")
    limits = [0.0, math.inf] if given is None else [_to_number(limit) for limit in given] if isinstance(given, list) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise ModelError("time_step_limit must list the least and the greatest time step", param="time_step_limit")
    return limits[0], limits[1]


def _to_number(limit: object) -> float:
    """transformers writes infinity as an object, as JSON has no name for it."""
    if limit == {"__float__": "Infinity"}:
        return math.inf
    return float(limit) if type(limit) in (int, float) else math.nan  # type: ignore[arg-type]
