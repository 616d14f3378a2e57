"""How far back each layer sees, by the rules of transformers for each family."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.models.config import ConfigFields
from cloister.types.errors import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_WIDEST = (1 << 31) - 1  # more than any context: everything is seen


def see_everything(_fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """No layer has a window."""
    return [None] * num_layers


def see_one_window(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Every layer has the window `sliding_window`, unless that is null (Mistral, Mixtral, Phi-3)."""
    return [take_window(fields)] * num_layers


def see_window_if_used(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Every layer has the window `sliding_window` if `use_sliding_window` says so (Qwen3-MoE)."""
    used = fields.take("use_sliding_window", bool, False)
    window = take_window(fields)
    return [window if used else None] * num_layers


def see_late_windows(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Layers from `max_window_layers` on have the window, unless `layer_types` says which (Qwen2, Qwen3)."""
    first = fields.take("max_window_layers", int, 28)
    return _see_if_used(fields, num_layers, [number >= first for number in range(num_layers)])


def see_every_other_early_window(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Layers 0, 2, ... before `max_window_layers` have the window, unless `layer_types` says which (Qwen2-MoE)."""
    end = fields.take("max_window_layers", int, 28)
    return _see_if_used(fields, num_layers, [number % 2 == 0 and number < end for number in range(num_layers)])


def see_listed_windows(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """`layer_types` says which layers have the window; without it none has (SmolLM3)."""
    return _see_if_used(fields, num_layers, [False] * num_layers)


def see_by_pattern(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """Every layer but each `sliding_window_pattern`-th has the window, unless `layer_types` says which (Gemma)."""
    window = take_window(fields)
    pattern = fields.take_size("sliding_window_pattern")
    kinds = _take_kinds(fields, num_layers) or [_SLIDING if (i + 1) % pattern else _FULL for i in range(num_layers)]
    if window is None and _SLIDING in kinds:
        raise ModelError("sliding_window must be at least 1 where a layer is of kind sliding_attention", param="sliding_window")
    return [window if kind == _SLIDING else None for kind in kinds]


def take_window(fields: ConfigFields) -> int | None:
    """Returns `sliding_window`, None where it is null or 0."""
    window = fields.take_nullable("sliding_window", int)
    if window is not None and window < 0:
        raise ModelError("sliding_window must be at least 1, or null for none", param="sliding_window")
    return min(window, _WIDEST) if window else None


def _see_if_used(fields: ConfigFields, num_layers: int, sliding: Sequence[bool]) -> Sequence[int | None]:
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, 4096 if used else None)
    kinds = _take_kinds(fields, num_layers) or [_SLIDING if used and is_sliding else _FULL for is_sliding in sliding]
    if not used and _SLIDING in kinds:
        raise ModelError("layer_types may hold sliding_attention only with use_sliding_window true", param="layer_types")
    if used and (window is None or window < 1):
        raise ModelError("sliding_window must be at least 1 where use_sliding_window is set", param="sliding_window")
    return [min(window, _WIDEST) if window and kind == _SLIDING else None for kind in kinds]


def _take_kinds(fields: ConfigFields, num_layers: int) -> list[str] | None:
    kinds = fields.take_any("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError("layer_types must list one kind for each of num_hidden_layers", param="layer_types")
    if any(kind not in (_FULL, _SLIDING) for kind in kinds):
        raise ModelError(f"layer_types may hold {_FULL} and {_SLIDING}", param="layer_types")
    return kinds
