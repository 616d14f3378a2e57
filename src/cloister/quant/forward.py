"""A reference decoder in numpy, run layer by layer over whole windows of text, for calibration and for measuring quality."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, LayerSpec, MlpSpec, RopeSpec
from cloister.backends.tensors import InputRounding, Tensor, dequantized, rotate_blocks, round_inputs, rounding_of
from cloister.quant.base import FloatArray, KVDtype, NumberFormat, reciprocal
from cloister.types.errors import ConfigError

# Which decoders this reference supports.


_FACED = (
    "text runs through decoders of Llama's or Gemma's shape only; here choose a method that uses no text (--method rtn) and "
    "measure nothing (--measure 0)"
)


def check_forward(spec: DecoderSpec) -> None:
    """Refuses a decoder that `forward.LayerForward` does not compute.

    Raises:
        ConfigError: it says what to choose instead.
    """
    if spec.norm != "rms" or spec.norm_bias or spec.position_embeddings or spec.head_bias or spec.streams is not None:
        raise ConfigError(f"{_FACED}: {spec.family!r} has ends or norms of its own", param="method")
    for layer in set(spec.layers):
        attention = layer.attention
        if attention is None or layer.state is not None:
            raise ConfigError(f"{_FACED}: {spec.family!r} has layers with a state, or without attention", param="method")
        if not isinstance(attention, AttentionSpec):
            raise ConfigError(f"{_FACED}: {spec.family!r} has latent attention", param="method")
        if attention.gated or (attention.input_scale, attention.output_scale) != (1.0, 1.0):
            raise ConfigError(f"{_FACED}: {spec.family!r} has gated or scaled attention", param="method")
        feed_forward_of(layer)
        rope_of(layer)
        if layer.parallel or not layer.pre_norm or attention.qk_norm_over != "head" or _is_special(attention):
            raise ConfigError(f"{_FACED}: {spec.family!r} has blocks of its own", param="method")


def _is_special(attention: AttentionSpec) -> bool:
    of_heads = attention.sinks or attention.v_norm or not attention.qk_norm_weighted
    return of_heads or attention.chunked or attention.query_growth is not None or attention.shared_kv is not None


def feed_forward_of(layer: LayerSpec) -> MlpSpec:
    """Returns a layer's feed-forward, which must be one with a gate (ConfigError otherwise)."""
    if not isinstance(layer.mlp, MlpSpec) or not layer.mlp.gated or not _has_plain_gate(layer.mlp):
        raise ConfigError(
            f"{_FACED}: its feed-forwards are experts, or have no gate or a clipped or sparse one", param="method"
        )
    return layer.mlp


def _has_plain_gate(mlp: MlpSpec) -> bool:
    return mlp.clipped is None and not mlp.is_scaled and not mlp.sparsity


def rope_of(layer: LayerSpec) -> RopeSpec:
    """Returns what a layer turns by, which must be all of a head (ConfigError otherwise)."""
    attention = layer.grouped_attention
    rope = attention.rope
    if rope is None or rope.interleaved or 2 * len(rope.inv_freq) != attention.head_dim:
        raise ConfigError(f"{_FACED}: its heads are not turned, or not whole", param="method")
    return rope


# Reference quantization of keys and values, for measuring quality.


GROUP_DIMS = 64
"""Dimensions of a head that share a scale."""
_ROTATIONS = (64, 16)
SHORTEST_INT4_HEAD = 64
"""In shorter heads 4-bit values save next to nothing: their scales take as much (docs/quantization.md)."""


def choose_kv_dtype(number_format: NumberFormat, spec: DecoderSpec) -> KVDtype:
    """Returns what the KV cache of a model should hold beside weights in this format."""
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        return "bfloat16"  # there are no kernels for latents in few bits
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]
    shortest = min((attention.head_dim for attention in attentions), default=SHORTEST_INT4_HEAD)
    return "int8" if number_format.kv_dtype == "int4" and shortest < SHORTEST_INT4_HEAD else number_format.kv_dtype


def round_keys(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    """Returns keys [..., head_dim] as the cache gives them back: in 8 bits both in "int8" and in "int4".

    Heads are rotated (`backends.tensors.rotate_blocks`), and each group of 64 dimensions has a scale of its own: its greatest
    magnitude over 127.
    """
    return _round_numbers(heads) if kv_dtype == "bfloat16" else _round_rotated(heads, _round_to_int8)


def round_values(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    """Returns values [..., head_dim] as the cache gives them back.

    In "int8" like keys; in "int4" a group has a scale, a fifteenth of its range, above its lowest value (QServe, Lin et al.
    2024, section 5.3).
    """
    if kv_dtype == "bfloat16":
        return _round_numbers(heads)
    return _round_rotated(heads, _round_to_int8 if kv_dtype == "int8" else _round_to_int4)


def _round_numbers(heads: FloatArray) -> FloatArray:
    return heads.astype(ml_dtypes.bfloat16).astype(np.float32)


def _round_rotated(heads: FloatArray, rounded: Callable[[FloatArray], FloatArray]) -> FloatArray:
    rotation = next((size for size in _ROTATIONS if heads.shape[-1] % size == 0), 0)
    rotated = rotate_blocks(np.asarray(heads, np.float32), rotation)
    cuts = range(GROUP_DIMS, heads.shape[-1], GROUP_DIMS)
    groups = [rounded(group) for group in np.split(rotated, cuts, axis=-1)]
    return rotate_blocks(np.concatenate(groups, axis=-1), rotation)


def _round_to_int8(group: FloatArray) -> FloatArray:
    scale = np.abs(group).max(-1, keepdims=True) / np.float32(127)
    rounded: FloatArray = np.rint(group * reciprocal(scale)) * scale
    return rounded


def _round_to_int4(group: FloatArray) -> FloatArray:
    lowest = group.min(-1, keepdims=True)
    scale = np.ptp(group, axis=-1, keepdims=True) / np.float32(15)
    rounded: FloatArray = np.rint((group - lowest) * reciprocal(scale)) * scale + lowest
    return rounded


LayerTensors: TypeAlias = Mapping[str, Tensor]
"""One layer's tensors under their canonical names less `layers.L.`, such as `q.weight`."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix ready to be multiplied many times: dequantised once; its inputs are rounded as it asks for."""

    weight: FloatArray
    bias: FloatArray | None
    rounding: InputRounding | None

    @classmethod
    def of(cls, weight: Tensor, bias: FloatArray | None) -> _Product:
        rounding = rounding_of(weight)
        numbers = dequantized(weight) if rounding is None or isinstance(weight, np.ndarray) else weight.dequantize_rotated()
        return cls(np.asarray(numbers, np.float32), bias, rounding)

    def __call__(self, inputs: _Inputs) -> FloatArray:
        out: FloatArray = inputs.rounded(self.rounding) @ self.weight.T
        if self.bias is not None:
            out += self.bias
        return out


class _Inputs:
    """What several matrices read: rounded once for all that ask for it in the same way."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows
        self._rounded: dict[InputRounding, FloatArray] = {}

    def rounded(self, rounding: InputRounding | None) -> FloatArray:
        if rounding is None:
            return self._rows
        if rounding not in self._rounded:
            self._rounded[rounding] = round_inputs(self._rows, rounding)
        return self._rounded[rounding]


class LayerForward:
    """One layer, ready to run windows through."""

    def __init__(self, spec: LayerSpec, tensors: LayerTensors, norm_eps: float, kv_dtype: KVDtype = "bfloat16") -> None:
        self._spec, self._eps, self._kv_dtype = spec, norm_eps, kv_dtype
        self._tensors = tensors
        self._products: dict[str, _Product] = {}

    def __call__(self, hidden: FloatArray) -> FloatArray:
        """Returns the layer's output [length, hidden] for one window's input of the same shape."""
        *_, (_, out) = self.steps(hidden)
        return out

    def steps(self, hidden: FloatArray) -> Iterator[tuple[str, FloatArray]]:
        """Yields what flows through the layer as it comes about; a caller that has seen enough need not go on.

        That is the inputs [length, in] of `qkv`, then `keys` [length, num_kv_heads, head_dim] after rotation, the inputs of
        `o`, `gate_up` and `down`, and the output as `out`. A matrix is read when its turn comes, so a caller may replace those
        that read the inputs it was just given.
        """
        spec = self._spec.grouped_attention
        normed = rms_norm(hidden, self._vector("attention_norm"), self._eps)
        yield "qkv", normed
        inputs = _Inputs(normed)
        queries, keys, values = (self._heads(name, inputs) for name in "qkv")
        cos, sin = rotation(rope_of(self._spec), len(normed))
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        yield "keys", keys
        mixed = attend(queries, round_keys(keys, self._kv_dtype), round_values(values, self._kv_dtype), spec)
        del inputs, queries, keys, values
        yield "o", mixed
        hidden = self._add(hidden, self._multiply("o", _Inputs(mixed)), "attention")
        normed = rms_norm(hidden, self._vector("mlp_norm"), self._eps)
        yield "gate_up", normed
        activation = ACTIVATIONS[feed_forward_of(self._spec).activation]
        inputs = _Inputs(normed)
        gated = activation(self._multiply("gate", inputs)) * self._multiply("up", inputs)
        del inputs, normed
        yield "down", gated
        yield "out", self._add(hidden, self._multiply("down", _Inputs(gated)), "mlp")

    def _add(self, hidden: FloatArray, part: FloatArray, name: str) -> FloatArray:
        """The residual sum of a part's output, normed first where the layer does so."""
        if self._spec.post_norm:
            part = rms_norm(part, self._vector(f"{name}_post_norm"), self._eps)
        total: FloatArray = hidden + part * np.float32(self._spec.residual_scale)
        return total

    def _heads(self, name: str, inputs: _Inputs) -> FloatArray:
        rows = self._multiply(name, inputs)
        heads = rows.reshape(len(rows), -1, self._spec.grouped_attention.head_dim)
        if self._spec.grouped_attention.qk_norm and name != "v":
            return rms_norm(heads, self._vector(f"{name}_norm"), self._eps)
        return heads

    def _multiply(self, name: str, inputs: _Inputs) -> FloatArray:
        if name not in self._products:
            self._products[name] = self._product(name)
        return self._products[name](inputs)

    def _product(self, name: str) -> _Product:
        weight = self._tensors[f"{name}.weight"]
        bias = self._vector(name, "bias") if f"{name}.bias" in self._tensors else None
        return _Product.of(weight, bias)

    def _vector(self, name: str, part: str = "weight") -> FloatArray:
        return np.asarray(dequantized(self._tensors[f"{name}.{part}"]), np.float32)


def multiply(rows: FloatArray, weight: Tensor) -> FloatArray:
    """Returns rows [num_rows, in] times a matrix [out, in], the rows rounded as the matrix asks for."""
    return _Product.of(weight, None)(_Inputs(rows))


def rms_norm(rows: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019)."""
    mean_square = np.square(rows).mean(-1, keepdims=True)
    normed: FloatArray = rows / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def rotation(rope: RopeSpec, length: int) -> tuple[FloatArray, FloatArray]:
    """Returns cosines and sines [length, 1, head_dim / 2] of positions from 0 on."""
    angles = np.outer(np.arange(length, dtype=np.float32), np.array(rope.inv_freq, np.float32))[:, None]
    return np.cos(angles) * np.float32(rope.attention_scale), np.sin(angles) * np.float32(rope.attention_scale)


def rotate(heads: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Turns [length, num_heads, head_dim] by position, pairing the halves of a head (Su et al. 2021)."""
    first, second = np.split(heads, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(queries: FloatArray, keys: FloatArray, values: FloatArray, spec: AttentionSpec) -> FloatArray:
    """Returns [length, num_heads * head_dim] of causal attention inside one window, head by head."""
    length, group = len(queries), spec.num_heads // spec.num_kv_heads
    hidden = _hidden(length, spec.window)
    mixed = np.empty_like(queries)
    for head in range(spec.num_heads):
        scores = soft_cap(queries[:, head] @ keys[:, head // group].T * np.float32(spec.scale), spec.softcap)
        scores[hidden] = -np.inf
        scores -= scores.max(1, keepdims=True)
        weights = np.exp(scores, out=scores)
        mixed[:, head] = weights @ values[:, head // group] / weights.sum(1, keepdims=True)
    return mixed.reshape(length, -1)


def soft_cap(rows: FloatArray, cap: float | None) -> FloatArray:
    """Returns cap * tanh(rows / cap), or the rows where there is no cap (Gemma 2, Riviere et al. 2024)."""
    if cap is None:
        return rows
    capped: FloatArray = np.tanh(rows / np.float32(cap)) * np.float32(cap)
    return capped


def _hidden(length: int, window: int | None) -> npt.NDArray[np.bool_]:
    places = np.arange(length)
    hidden: npt.NDArray[np.bool_] = places > places[:, None]
    return hidden if window is None else hidden | (places <= places[:, None] - window)


def _silu(rows: FloatArray) -> FloatArray:
    activated: FloatArray = rows / (1 + np.exp(-np.clip(rows, -80, None)))
    return activated


def _relu(rows: FloatArray) -> FloatArray:
    return np.maximum(rows, 0)


def _gelu_tanh(rows: FloatArray) -> FloatArray:
    inner = np.float32(sqrt(2 / np.pi)) * (rows + np.float32(0.044715) * rows**3)
    activated: FloatArray = rows / 2 * (1 + np.tanh(inner))
    return activated


def _gelu(rows: FloatArray) -> FloatArray:
    """Hendrycks and Gimpel 2016, with erf from Abramowitz and Stegun 7.1.26 (1.5e-7 off at most)."""
    scaled = np.abs(rows) / np.float32(sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * scaled)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    erf = np.sign(rows) * (1 - series * np.exp(-np.square(scaled)))
    return np.asarray(rows / 2 * (1 + erf), np.float32)


ACTIVATIONS: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
}
