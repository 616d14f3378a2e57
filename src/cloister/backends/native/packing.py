"""Packs weights, once, into the layout of the kernels (cpp/layout.hpp)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.native import _native
from cloister.backends.native.memory import Arena, ByteArray, reserve
from cloister.backends.spec import (
    AnyAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    MoeSpec,
    ShortConvSpec,
    StateSpec,
)
from cloister.backends.tensors import (
    E2M1_BITS,
    GroupedTensor,
    InputRounding,
    ProgressiveTensor,
    QuantizedTensor,
    Tensor,
    rounding_of,
    take_rows,
)

LAYOUT = 4  # raise it when packed bytes change their meaning
PANEL = 32
_CHUNK = 1 << 18  # numbers that are dequantised at once: they stay in a core's own cache
_SUM_LENGTH = 32  # the kernels keep sums of inputs for groups of this length and its multiples
_E2M1_ZERO = 12  # the codes of E2M1 that kernels multiply are so much more than twice its numbers
IntArray = npt.NDArray[np.int32]


class PackedKind(IntEnum):
    """What a packed matrix holds (cpp/layout.hpp, `Kind`)."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    QOQ = 4
    W4A16 = 5


_SOURCES: Mapping[np.dtype[Any], int] = {
    np.dtype(np.float32): 0,
    np.dtype(ml_dtypes.bfloat16): 1,
    np.dtype(np.float16): 2,
    np.dtype(np.uint8): 3,
}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix as the kernels read it.

    Attributes:
        group: inputs that share a scale; 0 for none.
        zero_point: what is taken off every code where there are no `zeros`.
        group_inputs: inputs have a scale for each group, not for each token.
        rotation: of the inputs (`backends.tensors.rotate_blocks`).
        e2m1: codes are floats of 4 bits, and scales have one byte (`backends.tensors.GroupedTensor.is_mxfp4`, `is_nvfp4`).
        parts: flat arrays by name: codes, channel_scales, scales, output_scales, zeros, offsets, group_scales, bias.
    """

    kind: PackedKind
    outputs: int
    inputs: int
    group: int
    zero_point: int
    group_inputs: bool
    rotation: int
    e2m1: bool
    parts: Mapping[str, npt.NDArray[Any]] = field(repr=False)

    def bind(self) -> _native.Matrix:
        """Returns the kernels' view; it does not keep the arrays alive."""
        part = self.parts.get
        scales = part("scales")
        return _native.Matrix(
            kind=int(self.kind),
            outputs=self.outputs,
            inputs=self.inputs,
            group=self.group,
            zero_point=self.zero_point,
            group_inputs=self.group_inputs,
            rotation=self.rotation,
            e2m1=self.e2m1,
            codes=self.parts["codes"],
            channel_scales=part("channel_scales"),
            scales=None if scales is None else scales.view(np.uint8),
            scale_bytes=2 if scales is None else scales.itemsize,
            output_scales=part("output_scales"),
            zeros=part("zeros"),
            offsets=part("offsets"),
            group_scales=part("group_scales"),
            bias=part("bias"),
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class Packer:
    """Packs matrices of one model.

    Args:
        dense: kind of matrices that come as numbers, F32 or BF16.
        arena: where all of them lie, if they are kept equally long.
    """

    def __init__(self, pool: _native.Pool, dense: PackedKind, arena: Arena | None = None) -> None:
        self._pool, self._dense, self._arena = pool, dense, arena

    def join(self, tensors: Sequence[Tensor], biases: Sequence[npt.NDArray[Any] | None]) -> PackedMatrix:
        """Packs matrices of the same inputs one below the other."""
        heights = [tensor.shape[0] for tensor in tensors]
        starts = np.cumsum([0, *heights])
        return self._pack(tensors, [_places(start, start + rows) for start, rows in zip(starts, heights, strict=False)], biases)

    def join_exactly(self, tensors: Sequence[npt.NDArray[Any]], biases: Sequence[npt.NDArray[Any] | None]) -> PackedMatrix:
        """`join` in float32, whatever the others are."""
        return Packer(self._pool, PackedKind.F32, self._arena).join(tensors, biases)

    def stack_heads(self, heads: npt.NDArray[np.float32]) -> PackedMatrix:
        """Packs matrices [num_heads, outputs, inputs] one below the other, each from a whole panel on."""
        num_heads, outputs, inputs = heads.shape
        places = (np.arange(num_heads)[:, None] * _padded(outputs) + np.arange(outputs)).reshape(-1).astype(np.int32)
        return self._pack([np.ascontiguousarray(heads).reshape(-1, inputs)], [places], [None])

    def interleave(self, gate: Tensor, up: Tensor, biases: Sequence[npt.NDArray[Any] | None]) -> PackedMatrix:
        """Packs gate and up so that a panel holds 16 outputs of each."""
        rows = np.arange(gate.shape[0], dtype=np.int32)
        places = (rows // 16 * PANEL + rows % 16).astype(np.int32)
        return self._pack([gate, up], [places, (places + 16).astype(np.int32)], biases)

    def _pack(
        self, tensors: Sequence[Tensor], places: Sequence[IntArray], biases: Sequence[npt.NDArray[Any] | None]
    ) -> PackedMatrix:
        tensors = _alike([_supported(tensor) for tensor in tensors])
        kind = self._dense if isinstance(tensors[0], np.ndarray) else _kind_of(tensors[0])
        outputs, inputs = int(max(place[-1] for place in places)) + 1, tensors[0].shape[1]
        take = reserve if self._arena is None else self._arena.take
        parts: dict[str, npt.NDArray[Any]] = {"codes": take(_native.packed_bytes(int(kind), outputs, inputs))}
        for tensor, place in zip(tensors, places, strict=True):
            self._pack_codes(kind, tensor, place, parts["codes"])
        panels = -(-outputs // PANEL)
        for name, columns in _metadata(tensors).items():
            parts[name] = self._keep(_by_panel(columns, places, panels))
        if any(bias is not None for bias in biases):
            shifts = [
                np.zeros((t.shape[0], 1), np.float32) if bias is None else np.asarray(bias, np.float32)[:, None]
                for t, bias in zip(tensors, biases, strict=True)
            ]
            parts["bias"] = self._keep(_by_panel(shifts, places, panels))
        grouped = kind is PackedKind.QOQ or "scales" in parts
        group = tensors[0].group_size if grouped and not isinstance(tensors[0], np.ndarray) else 0
        rounding = rounding_of(tensors[0]) or InputRounding()
        return PackedMatrix(
            kind,
            outputs,
            inputs,
            group,
            _zero_point(kind, tensors),
            rounding.group_size > 0,
            rounding.rotation,
            _is_e2m1(tensors[0]),
            parts,
        )

    def _keep(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array if self._arena is None else self._arena.keep(array)

    def _pack_codes(self, kind: PackedKind, tensor: Tensor, places: IntArray, codes: ByteArray) -> None:
        data = tensor if isinstance(tensor, np.ndarray) else tensor.codes
        if _is_e2m1(tensor):
            data = E2M1_BITS[data]
        if data.dtype not in _SOURCES:
            data = data.astype(np.float32)
        data = np.ascontiguousarray(data)
        flat = data.reshape(-1).view(np.uint8)
        _native.pack(self._pool, int(kind), _SOURCES[data.dtype], flat, data.shape[0], data.shape[1], places, codes)


def _zero_point(kind: PackedKind, tensors: Sequence[Tensor]) -> int:
    """Returns what is taken off every code, where that is one number for all."""
    if _is_e2m1(tensors[0]):
        return _E2M1_ZERO
    middle = {PackedKind.INT8: 128, PackedKind.INT4: 8, PackedKind.QOQ: 128, PackedKind.W4A16: 8}.get(kind, 0)
    common = _common_zero([t for t in tensors if isinstance(t, GroupedTensor)])
    return middle if common is None else common


def _common_zero(tensors: Sequence[GroupedTensor]) -> int | None:
    """Returns the zero point that all groups of tensors with offsets have, as those of GGUF do; None where they differ.

    Of tensors without offsets kernels expect the middle of the codes, or one for each group.
    """
    if not any(t.offsets is not None for t in tensors):
        return None
    found = {2 ** (t.bits - 1) if t.zeros is None else int(t.zeros.flat[0]) for t in tensors}
    same = all(t.zeros is None or np.all(t.zeros == t.zeros.flat[0]) for t in tensors)
    return found.pop() if same and len(found) == 1 else None


def _places(start: int, end: int) -> IntArray:
    return np.arange(start, end, dtype=np.int32)


def packed_bytes(rows: Sequence[Tensor], outputs: int, dense: PackedKind, *, has_bias: bool) -> int:
    """Returns the bytes that matrices take packed as one, for a row [1, in] of each (`Weights.form`).

    Args:
        outputs: of all together, in the order that they are packed in.
        dense: kind of what becomes numbers.
    """
    rows = _alike([_supported(row) for row in rows])
    kind = dense if isinstance(rows[0], np.ndarray) else _kind_of(rows[0])
    beside: int = sum(columns[0].shape[1] * columns[0].itemsize for columns in _metadata(rows).values())
    padded = -(-outputs // PANEL) * PANEL
    return _native.packed_bytes(int(kind), outputs, rows[0].shape[1]) + padded * (beside + 4 * has_bias)


def _supported(tensor: Tensor) -> Tensor:
    """Returns the tensor, or its dequantisation in bfloat16 where no kernel computes on its codes."""
    if isinstance(tensor, np.ndarray):
        return tensor
    return tensor if _has_kernel(tensor) else _as_numbers(tensor)


def _as_numbers(tensor: QuantizedTensor) -> npt.NDArray[Any]:
    """Returns a tensor in bfloat16, made some rows at a time, so that nothing of float32 is ever as large as it."""
    numbers = np.empty(tensor.shape, ml_dtypes.bfloat16)
    step = max(1, _CHUNK // tensor.shape[1])
    for top in range(0, len(numbers), step):
        numbers[top : top + step] = take_rows(tensor, slice(top, top + step)).dequantize()
    return numbers


def _has_kernel(tensor: GroupedTensor | ProgressiveTensor) -> bool:
    whole_groups = tensor.group_size % _SUM_LENGTH == 0
    if isinstance(tensor, ProgressiveTensor) or tensor.is_mxfp4:
        return whole_groups
    if tensor.is_nvfp4:
        return tensor.activations == "bfloat16"
    if tensor.order is not None:
        return False
    if tensor.activations == "int8_group":
        return whole_groups and not tensor.rotation
    if tensor.activations == "bfloat16":
        return tensor.bits == 4 and whole_groups
    return whole_groups or _scaled_by_row(tensor)


def _scaled_by_row(tensor: Tensor) -> bool:
    """Tells whether a tensor is int8 with nothing but one scale for each output."""
    if not isinstance(tensor, GroupedTensor) or tensor.bits != 8:
        return False
    return tensor.group_size == tensor.shape[1] and tensor.zeros is None and tensor.offsets is None


def _alike(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns tensors that can stand in one matrix: themselves, or all as numbers."""
    kinds = {
        (type(t),) if isinstance(t, np.ndarray) else (_kind_of(t), _is_e2m1(t), t.group_size, rounding_of(t)) for t in tensors
    }
    if len(kinds) == 1:
        return tensors
    return [t if isinstance(t, np.ndarray) else _as_numbers(t) for t in tensors]


def _kind_of(tensor: GroupedTensor | ProgressiveTensor) -> PackedKind:
    if isinstance(tensor, ProgressiveTensor):
        return PackedKind.QOQ
    if tensor.bits == 8 and not _is_e2m1(tensor):
        return PackedKind.INT8
    return PackedKind.W4A16 if tensor.activations == "bfloat16" else PackedKind.INT4


def _is_e2m1(tensor: Tensor) -> bool:
    return isinstance(tensor, GroupedTensor) and tensor.is_e2m1


def _metadata(tensors: Sequence[Tensor]) -> dict[str, list[npt.NDArray[Any]]]:
    """Returns what stands beside the codes, by name, one array [outputs, groups] for each tensor."""
    progressive = [t for t in tensors if isinstance(t, ProgressiveTensor)]
    if progressive:
        return {
            "channel_scales": [t.channel_scales[:, None] for t in progressive],
            "group_scales": [t.group_scales for t in progressive],
            "zeros": [t.zeros for t in progressive],
        }
    grouped = [t for t in tensors if isinstance(t, GroupedTensor)]
    if not grouped:
        return {}
    if all(_scaled_by_row(t) and t.activations == "int8" for t in grouped):
        return {"channel_scales": [t.scales for t in grouped]}
    if grouped[0].is_mxfp4:  # so are all: a scale of 2 ** (e - 128) is the byte e
        return {"scales": [(np.frexp(t.scales)[1] + 127).astype(np.uint8) for t in grouped]}
    if grouped[0].is_nvfp4:
        return {
            "scales": [(2 * t.scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for t in grouped],
            "output_scales": [t.output_scales[:, None] for t in grouped if t.output_scales is not None],
        }
    exact = all(np.array_equal(t.scales.astype(np.float16).astype(np.float32), t.scales) for t in grouped)
    found: dict[str, list[npt.NDArray[Any]]] = {
        "scales": [t.scales.astype(np.float16 if exact else np.float32) for t in grouped]
    }
    if any(t.zeros is not None for t in grouped) and _common_zero(grouped) is None:
        middle = [np.full(t.scales.shape, 2 ** (t.bits - 1), np.uint8) if t.zeros is None else t.zeros for t in grouped]
        found["zeros"] = middle
    if any(t.offsets is not None for t in grouped):
        found["offsets"] = [np.zeros_like(t.scales) if t.offsets is None else t.offsets for t in grouped]
    return found


def _by_panel(columns: Sequence[npt.NDArray[Any]], places: Sequence[IntArray], panels: int) -> npt.NDArray[Any]:
    """Returns [panels, groups, 32], flat, of arrays [outputs, groups] whose rows stand at `places`."""
    table = np.zeros((panels * PANEL, columns[0].shape[1]), columns[0].dtype)
    for column, place in zip(columns, places, strict=True):
        table[place] = column
    return np.ascontiguousarray(table.reshape(panels, PANEL, -1).transpose(0, 2, 1)).reshape(-1)


# Memory of a step's buffers (cpp/program.cpp), counted before anything is allocated.


_PAGE = 4096  # every buffer takes whole ones
_NUM_BUFFERS = 11
_NUM_MIXTURE_BUFFERS = 6
_NUM_STREAM_BUFFERS = 7
_MOST_PARTIAL_BYTES, _MOST_SHARED_BYTES = 64 << 20, 16 << 20  # cpp/program.cpp
_DELTA_BYTES = 33 << 10  # cpp/delta_net.hpp, `DeltaScratch`, for the longest keys


def buffer_bytes(spec: DecoderSpec, *, num_tokens: int, num_threads: int, kernels: str, is_wide: bool) -> int:
    """Returns the bytes of all buffers after a step of `num_tokens`, without logits.

    Args:
        is_wide: inputs of products are float32.
    """
    return (
        num_tokens * _row_bytes(spec, is_wide)
        + num_threads * _scratch_bytes(spec, kernels)
        + _partial_bytes(spec, num_tokens, num_threads)
        + _rotation_bytes(spec)
    )


def _row_bytes(spec: DecoderSpec, is_wide: bool) -> int:
    """Bytes that one token takes in the buffers of a step: residual, QKV, queries, mixed values, inputs of two products."""
    layers = set(spec.layers)
    mixers = max((_mixer_bytes(layer, spec.hidden_size, is_wide) for layer in layers), default=0)
    branches = max((_branch_bytes(layer, spec.hidden_size, is_wide) for layer in layers), default=0)
    merged = _input_bytes(2 * spec.hidden_size, is_wide) if spec.merges_hidden else 0
    return 12 * spec.hidden_size + mixers + branches + _stream_bytes(spec) + merged


def _stream_bytes(spec: DecoderSpec) -> int:
    """Bytes that one token takes for several streams, before the last layer and behind it, and for inputs of layers."""
    streams = spec.streams
    if streams is None:
        return 0
    inputs = _padded(len(spec.layers) * streams.input_size) + _padded(max(streams.laurel_rank, streams.input_size))
    return 4 * (2 * streams.num_streams * spec.hidden_size + inputs + _padded(spec.hidden_size))


def _mixer_bytes(layer: LayerSpec, hidden: int, is_wide: bool) -> int:
    attention = 0 if layer.attention is None else _attention_bytes(layer.attention, is_wide)
    beside = _input_bytes(hidden, is_wide) if layer.attention is not None and layer.state is not None else 0
    return attention + _state_bytes(layer.state, is_wide) + beside


def _state_bytes(state: StateSpec | None, is_wide: bool) -> int:
    if isinstance(state, ShortConvSpec):
        return 4 * (_padded(3 * state.size) + state.size)
    if isinstance(state, Mamba2Spec):
        projected = _padded(state.inner_size + state.conv_size + state.num_heads)
        return 4 * (projected + state.conv_size + state.inner_size) + _input_bytes(state.inner_size, is_wide)
    if isinstance(state, GatedDeltaNetSpec):
        projected = _padded(state.value_size + state.conv_size) + _padded(2 * state.num_value_heads)
        return 4 * (projected + state.conv_size + state.value_size) + _input_bytes(state.value_size, is_wide)
    return 0


def _attention_bytes(attention: AnyAttentionSpec, is_wide: bool) -> int:
    if not isinstance(attention, LatentAttentionSpec):
        gates = 4 * attention.num_heads if attention.gated else 0
        return (14 * (attention.num_heads + attention.num_kv_heads) + gates) * attention.head_dim
    heads, rank, width = attention.num_heads, attention.kv_lora_rank, 4 if is_wide else 2
    queries = heads * attention.qk_head_dim
    first = 4 * _padded((attention.q_lora_rank or queries) + attention.head_dim)
    # absorbed queries, mixed latents; and as attention reads them
    met = heads * (4 * _padded(rank) + width * _padded(attention.head_dim))
    inner = heads * max(_input_bytes(attention.qk_nope_head_dim, is_wide), _input_bytes(rank, is_wide))
    beside = max(queries if attention.q_lora_rank else 0, heads * _padded(attention.v_head_dim))
    return (
        first
        + met
        + inner
        + 4 * _padded(beside)
        + _input_bytes(max(heads * attention.v_head_dim, attention.q_lora_rank or 0), is_wide)
    )


def _branch_bytes(layer: LayerSpec, hidden: int, is_wide: bool) -> int:
    """What one token takes for a layer's feed-forward or mixture, and where branches wait to be joined."""
    mlp = layer.mlp
    beside = _padded(hidden) * 4 if layer.post_norm or layer.residual_scale != 1 or _shared(mlp) else 0
    early = _input_bytes(hidden, is_wide) * (layer.parallel + isinstance(layer.state, GatedDeltaNetSpec))
    if mlp is None:
        return beside + early
    if isinstance(mlp, MlpSpec):
        stored = 4 * 2 * _padded(mlp.intermediate_size) if mlp.sparsity else 0
        return 6 * mlp.intermediate_size + stored + beside + early
    routing = _input_bytes(hidden, True) + 4 * _padded(mlp.num_experts + mlp.shared_gate) + 12 * mlp.num_chosen + 4
    routing += 4 * mlp.num_groups if mlp.num_groups > 1 else 0
    pair = _input_bytes(hidden, is_wide) + 6 * _padded(mlp.expert.intermediate_size) + 4 * _padded(hidden)
    shared = _shared(mlp)
    early += _input_bytes(hidden, is_wide) if shared else 0  # where the shared one is in another number format
    return routing + max(mlp.num_chosen * pair, 6 * shared.intermediate_size if shared else 0) + beside + early


def _shared(mlp: MlpSpec | MoeSpec | None) -> MlpSpec | None:
    return mlp.shared if isinstance(mlp, MoeSpec) else None


def _input_bytes(length: int, is_wide: bool) -> int:
    """Bytes of one row of inputs: chunks of 64 bytes, two sums for each, a scale for 32 inputs at most and a total."""
    return -(-length // (16 if is_wide else 32)) * (64 + 8) + 4 * -(-length // 32) + 8


def _padded(length: int) -> int:
    return -(-length // 32) * 32


def _scratch_bytes(spec: DecoderSpec, kernels: str) -> int:
    """Bytes that one thread works in: gathered keys, scores, an unpacked panel, candidates of a draw; and a row of its own."""

    def widest(layer: LayerSpec) -> int:
        attention, mixed, value_dim = layer.attention, 0, 0
        if attention is not None:
            mixed = attention.num_heads * attention.head_dim
        if isinstance(attention, LatentAttentionSpec):
            mixed, value_dim = attention.num_heads * attention.v_head_dim, attention.kv_lora_rank
            mixed = max(mixed, attention.q_lora_rank or 0, value_dim)
        feeds = (mlp.intermediate_size for mlp in _feed_forwards(layer.mlp))
        inputs = max(spec.hidden_size * (2 if spec.merges_hidden else 1), mixed, _mixed_size(layer.state), *feeds)
        shape = (1, 1, 1) if attention is None else (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        streamed = 0 if spec.streams is None else 4 * len(spec.layers) * spec.streams.input_size
        scan = _DELTA_BYTES if isinstance(layer.state, GatedDeltaNetSpec) else 0
        return max(scan, streamed, _native.scratch_bytes(kernels, *shape, value_dim, inputs, spec.vocab_size))

    num_buffers = 1 + _NUM_BUFFERS + max(map(_num_more_buffers, set(spec.layers)))
    num_buffers += _NUM_STREAM_BUFFERS if spec.streams is not None else 0
    merged = 8 * _padded(spec.hidden_size) + _PAGE if spec.merges_hidden else 0
    return max(map(widest, set(spec.layers))) + 4 * spec.hidden_size + num_buffers * _PAGE + merged


def _mixed_size(state: StateSpec | None) -> int:
    """Numbers that the output projection of a mixer with a state reads."""
    if state is None:
        return 0
    if isinstance(state, ShortConvSpec):
        return state.size
    return state.inner_size if isinstance(state, Mamba2Spec) else state.value_size


def _feed_forwards(mlp: MlpSpec | MoeSpec | None) -> list[MlpSpec]:
    if mlp is None:
        return []
    if isinstance(mlp, MlpSpec):
        return [mlp]
    return [mlp.expert] if mlp.shared is None else [mlp.expert, mlp.shared]


def _num_more_buffers(layer: LayerSpec) -> int:
    """Buffers that only some layers need."""
    waits = layer.post_norm or layer.residual_scale != 1 or _shared(layer.mlp) is not None
    beside = layer.attention is not None and layer.state is not None
    latent = 2 * isinstance(layer.attention, LatentAttentionSpec)
    others = 2 * isinstance(layer.state, GatedDeltaNetSpec)
    return waits + beside + layer.parallel + latent + others + _NUM_MIXTURE_BUFFERS * isinstance(layer.mlp, MoeSpec)


def _partial_bytes(spec: DecoderSpec, num_tokens: int, num_threads: int) -> int:
    """Bytes of results of single splits of keys: splits that sequences share, and those of few tasks, which a team divides."""
    attentions = [layer.attention for layer in spec.layers if layer.attention is not None]

    def widest(num_splits: int, most_rows: float) -> int:
        each = (min(num_tokens * attention.num_heads, most_rows) * (attention.head_dim + 48) for attention in attentions)
        return 4 * num_splits * int(max(each, default=0))

    shared = min(widest((spec.max_positions - 1) // 256, math.inf), _MOST_SHARED_BYTES)
    if num_threads == 1:
        return shared
    num_splits = -(-spec.max_positions // 256)
    cut = widest(num_splits, 4 * num_threads * 256)
    return min(shared + cut, widest(num_splits, math.inf), _MOST_PARTIAL_BYTES)  # a row's split is shared or cut, not both


def _rotation_bytes(spec: DecoderSpec) -> int:
    """Bytes of the cosines and sines of all positions."""
    ropes = {layer.attention.rope for layer in spec.layers if layer.attention is not None}
    return sum(8 * len(rope.inv_freq) * spec.max_positions for rope in ropes if rope is not None)
