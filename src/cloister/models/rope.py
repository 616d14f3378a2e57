"""Rotary frequencies from a config, plain and scaled for longer contexts; and the sliding windows of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import RopeSpec
from cloister.models.config import ConfigFields
from cloister.types.errors import ModelError

Frequencies = npt.NDArray[np.float32]

_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Plain:
    """Rotation without scaling, and what scaling needs to know.

    Attributes:
        inv_freq: [num_frequencies] radians per position.
        max_positions: of the config.
        original: positions that the model was trained for before its context was stretched.
        length: positions that will be used at most.
    """

    inv_freq: Frequencies
    theta: float
    max_positions: int
    original: int
    length: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """What scaling makes of it.

    Attributes:
        attention_scale: multiplies cos and sin.
        max_positions: positions that can be used, where those are more than the config says (Qwen documents YaRN with the
            original length there); 0 otherwise.
    """

    inv_freq: Frequencies
    attention_scale: float = 1.0
    max_positions: int = 0


class RopeReader:
    """Reads what a config says of rotary positions.

    Some kinds of scaling change with the length of a sequence in transformers. Here the frequencies of a model are fixed, since
    keys stay as they were written and a sequence's answer must not depend on how it was cut: they are those of the
    greatest length that will be used.

    Args:
        max_positions: `max_position_embeddings`.
        max_model_len: the greatest length of a sequence, None for `max_positions`.
        partial: how much of a head is turned if the config does not say; None where the family always turns all of it.
        kinds: what the family means by a kind of scaling.

    Attributes:
        max_positions: the most positions that anything read so far can be used for.
        head_dim: numbers of a head.
    """

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        max_model_len: int | None,
        *,
        partial: float | None = None,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self.max_positions, self.head_dim = max_positions, head_dim
        self._trained, self._length = max_positions, max_model_len or max_positions
        self._partial, self._kinds = partial, {"su": "longrope", **(kinds or {})}

    def read(self, fields: ConfigFields) -> RopeSpec:
        """Returns the rotary embedding that a config asks for.

        Understands both forms: `rope_theta` beside `rope_scaling`, and `rope_parameters` (transformers 5).

        Raises:
            ModelError: a kind of scaling, or a parameter of one, that is not known.
        """
        scaling, parameters = fields.take_any("rope_scaling"), fields.take_any("rope_parameters")
        theta = fields.take("rope_theta", float, _DEFAULT_THETA)
        original = fields.take("original_max_position_embeddings", int, None)
        partial = None if self._partial is None else fields.take("partial_rotary_factor", float, None)
        return self.read_parameters(scaling or parameters or {}, theta, original=original, partial=partial)

    def read_parameters(
        self, given: object, theta: float, *, original: int | None = None, partial: float | None = None
    ) -> RopeSpec:
        """Returns what one set of parameters asks for; the other arguments count where it does not say."""
        if not isinstance(given, dict):
            raise ModelError("rope_scaling in config.json must be an object", param="rope_scaling")
        rope = ConfigFields(given, "rope parameters of config.json")
        theta = rope.take("rope_theta", float, theta)
        kind, legacy = rope.take("rope_type", str, None), rope.take("type", str, None)
        name = kind or legacy or "default"
        name = self._kinds.get(name, name)
        if name not in SCALINGS:
            known = ", ".join(SCALINGS)
            raise ModelError(f"rope type {name!r} is not supported; known types: {known}", param="rope_type")
        if theta <= 0:
            raise ModelError(f"rope_theta must be positive, not {theta}", param="rope_theta")
        original = original or rope.take("original_max_position_embeddings", int, None) or self._trained
        if original < 0:
            raise ModelError(
                f"original_max_position_embeddings must be positive, not {original}", param="original_max_position_embeddings"
            )
        plain = Plain(self._plain(rope, theta, partial), theta, self._trained, original, self._length)
        scaled = SCALINGS[name](plain, rope)
        rope.take_any("original_max_position_embeddings")
        rope.finish()
        self.max_positions = max(self.max_positions, scaled.max_positions)
        return RopeSpec(tuple(float(f) for f in scaled.inv_freq), scaled.attention_scale)

    def _plain(self, rope: ConfigFields, theta: float, partial: float | None) -> Frequencies:
        if self._partial is None:
            rope.require("partial_rotary_factor", 1.0)
            size = self.head_dim
        else:
            given = rope.take("partial_rotary_factor", float, partial or self._partial)
            size = int(self.head_dim * given)
        if size < 2 or size > self.head_dim or size % 2:
            raise ModelError(
                f"rotary positions turn an even number of each head's {self.head_dim} numbers, not {size}",
                param="partial_rotary_factor" if self._partial else "head_dim",
            )
        return _frequencies(theta, size)


def _frequencies(theta: float, size: int) -> Frequencies:
    """Returns theta ** (-2 i / size), [size / 2].

    Powers are rounded once, from float64: a last bit off is an angle off by that much a position, which sharp attention shows.
    """
    exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    powers = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    frequencies: Frequencies = (np.float32(1) / powers).astype(np.float32)
    return frequencies


def _default(plain: Plain, _rope: ConfigFields) -> Scaled:
    return Scaled(plain.inv_freq)


def _linear(plain: Plain, rope: ConfigFields) -> Scaled:
    """Slows all frequencies by `factor` (Chen et al. 2023)."""
    return Scaled(plain.inv_freq / np.float32(_take_factor(rope)))


def _dynamic(plain: Plain, rope: ConfigFields) -> Scaled:
    """Raises the base so far that the slowest frequency fits the length ("NTK-aware"; Peng et al. 2023, section 3.1).

    Lengths of up to `factor` times the config's can be asked for.
    """
    factor, size = _take_factor(rope), 2 * len(plain.inv_freq)
    if plain.length <= plain.max_positions:
        return Scaled(plain.inv_freq)
    length = min(plain.length, int(plain.max_positions * factor))
    theta = plain.theta * (factor * length / plain.max_positions - (factor - 1)) ** (size / (size - 2))
    return Scaled(_frequencies(theta, size), max_positions=length)


def _longrope(plain: Plain, rope: ConfigFields) -> Scaled:
    """Divides each frequency by a factor of its own, one list for short lengths and one for long (Ding et al. 2024)."""
    lists = {name: _take_factors(rope, name, len(plain.inv_freq)) for name in ("short_factor", "long_factor")}
    factor = rope.take("factor", float, None) or plain.max_positions / plain.original
    scale = rope.take("attention_factor", float, None)
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(plain.original)) if factor > 1 else 1.0
    factors = lists["long_factor" if plain.length > plain.original else "short_factor"]
    return Scaled((plain.inv_freq / factors).astype(np.float32), scale)


def _yarn(plain: Plain, rope: ConfigFields) -> Scaled:
    """Keeps frequencies that turn often within the original context, slows those that turn seldom by `factor`, and blends
    between (section 3.2); cos and sin grow with the logarithm of `factor` (equation 22)."""
    inv_freq, theta, context = plain.inv_freq, plain.theta, plain.original
    factor, num_pairs = _take_factor(rope), len(inv_freq)
    scale = rope.take("attention_factor", float, None) or _yarn_scale(rope, factor)
    turns = rope.take("beta_fast", float, None) or 32.0, rope.take("beta_slow", float, None) or 1.0
    if min(turns) <= 0 or theta <= 1:
        raise ModelError(f"{rope.source}: YaRN needs a positive beta_fast and beta_slow, and a rope_theta above 1")
    bounds = [2 * num_pairs * math.log(context / (number * 2 * math.pi)) / (2 * math.log(theta)) for number in turns]
    if rope.take("truncate", bool, True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], 2 * num_pairs - 1)
    ramp = (np.arange(num_pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low or 0.001)
    kept = 1 - np.clip(ramp, 0, 1)
    stretched = (inv_freq / np.float32(factor) * (1 - kept) + inv_freq * kept).astype(np.float32)
    return Scaled(stretched, scale, max_positions=int(context * factor))


def _yarn_scale(rope: ConfigFields, factor: float) -> float:
    """Equation 22, or the quotient of two of its kind where a config names both (DeepSeek-V2, Liu et al. 2024)."""
    above, below = rope.take("mscale", float, None), rope.take("mscale_all_dim", float, None)
    if factor <= 1:
        return 1.0
    if above and below:
        return (0.1 * above * math.log(factor) + 1.0) / (0.1 * below * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _llama3(plain: Plain, rope: ConfigFields) -> Scaled:
    """Slows long wavelengths by `factor`, keeps short ones, and blends between (Llama 3.1; Dubey et al. 2024)."""
    inv_freq, context = plain.inv_freq, plain.original
    factor = np.float32(_take_factor(rope))
    low, high = rope.take("low_freq_factor", float), rope.take("high_freq_factor", float)
    if not 0 < low <= high:
        raise ModelError("low_freq_factor must be positive, and high_freq_factor not less", param="low_freq_factor")
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = np.where(wavelength > context / low, inv_freq / factor, inv_freq)
    if high == low:  # nothing lies between them (Llama 4)
        return Scaled(slowed.astype(np.float32))
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * slowed / factor + blend * slowed
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return Scaled(np.where(between, blended, slowed).astype(np.float32))


def _take_factor(rope: ConfigFields) -> float:
    factor = rope.take("factor", float)
    if not 0 < factor < math.inf:
        raise ModelError(f"'factor' in {rope.source} must be positive, not {factor}", param="factor")
    return factor


def _take_factors(rope: ConfigFields, name: str, count: int) -> Frequencies:
    factors = rope.take_any(name)
    if not isinstance(factors, list) or len(factors) != count or not all(_is_positive(factor) for factor in factors):
        raise ModelError(f"{name!r} in {rope.source} must list a positive factor for each of {count} frequencies", param=name)
    return np.array(factors, np.float32)


def _is_positive(factor: object) -> bool:
    return isinstance(factor, int | float) and 0 < factor < math.inf


SCALINGS: Mapping[str, Callable[[Plain, ConfigFields], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


# The attention window of each layer, by the rules of transformers for each family.


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


def see_typed_windows(fields: ConfigFields, num_layers: int) -> Sequence[int | None]:
    """`layer_types` says which layers have the window; without it all have (Ministral)."""
    window = take_window(fields)
    kinds = _take_kinds(fields, num_layers) or [_SLIDING] * num_layers
    return [window if kind == _SLIDING else None for kind in kinds]


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
