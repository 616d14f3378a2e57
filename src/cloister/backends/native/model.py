"""A decoder's weights, packed: what a program is bound to, and what a cache file holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.base import Weights
from cloister.backends.native.packing import PANEL, PackedKind, PackedMatrix, Packer, packed_bytes
from cloister.backends.native.rotation import read_rows, row_orders
from cloister.backends.native.streams import stream_matrices, stream_vectors, table_bytes
from cloister.backends.spec import (
    AnyAttentionSpec,
    AttentionSpec,
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
from cloister.backends.tensors import Tensor, dequantized

FloatArray = npt.NDArray[np.float32]
_LANES = 16  # kernels read whole vectors
MERGE_NORMS = ("merge_embedding_norm", "merge_hidden_norm")
BESIDE = "beside."  # begins the names of matrices of a mixer with a state beside attention


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """Which tensors become one packed matrix.

    Attributes:
        name: of the packed matrix: embedding, merge, head, positions, or `layers.L.` and what it computes: qkv, steps, output,
            up (with gate where there is one), down, router; `beside.` begins those of a mixer with a state beside attention.
        sources: canonical names of the tensors, without `.weight`, one below the other.
        interleaved: two sources whose outputs stand 16 by 16 in turn.
        biased: the sources carry biases, but for the one named `unbiased`.
        exact: float32, whatever the format of the others.
        latent: where the source is `kv_b` of latent attention, of which `name` says which half of each head's rows this is.
    """

    name: str
    sources: tuple[str, ...]
    interleaved: bool = False
    biased: bool = False
    unbiased: str = ""
    exact: bool = False
    latent: LatentAttentionSpec | None = None


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All weights of a decoder by name.

    Attributes:
        matrices: as `matrices_of` lists them; without a head where the embedding serves.
        vectors: as `vectors_of` lists them.
    """

    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, FloatArray]

    def borrow_ends(self, lender: PackedModel) -> PackedModel:
        """Returns this model with the embedding and the head of another, which are not copied."""
        ends = {name: lender.matrices[name] for name in ("embedding", "head") if name in lender.matrices}
        bias = {name: lender.vectors[name] for name in ("head.bias",) if name in lender.vectors}
        return PackedModel({**self.matrices, **ends}, {**self.vectors, **bias})

    def fits(self, spec: DecoderSpec) -> bool:
        """Tells whether these are the weights that such a decoder needs."""
        matrices = {parts.name for parts in matrices_of(spec)}
        return self.matrices.keys() == matrices and self.vectors.keys() == {name for name, _ in vectors_of(spec)}


def matrices_of(spec: DecoderSpec) -> Iterator[MatrixParts]:
    """Yields the parts of a decoder's packed matrices."""
    yield MatrixParts("merge", ("merge",)) if spec.merges_hidden else MatrixParts("embedding", ("embed",))
    if spec.position_embeddings:
        yield MatrixParts("positions", ("positions",))
    if not spec.tied_embeddings and not spec.merges_hidden:
        yield MatrixParts("head", ("head",), biased=spec.head_bias)
    for number, layer in enumerate(spec.layers):
        yield from _layer_matrices(layer, f"layers.{number}.")
    if spec.streams is not None:
        yield from (MatrixParts(name, tuple(sources)) for name, sources in stream_matrices(spec.streams, len(spec.layers)))


def _layer_matrices(layer: LayerSpec, prefix: str) -> Iterator[MatrixParts]:
    mlp = layer.mlp
    if layer.attention is not None:
        yield from _attention_matrices(layer.attention, prefix)
    if layer.state is not None:
        yield from _state_matrices(layer.state, prefix, prefix if layer.attention is None else prefix + BESIDE)
    if isinstance(mlp, MlpSpec):
        yield from _mlp_matrices(mlp, prefix)
    if not isinstance(mlp, MoeSpec):
        return
    routers = ("router", "shared_router") if mlp.shared_gate else ("router",)
    yield MatrixParts(
        f"{prefix}router",
        tuple(prefix + name for name in routers),
        biased=mlp.router_bias,
        unbiased=f"{prefix}shared_router",
        exact=True,
    )
    for expert in range(mlp.num_experts):
        yield from _mlp_matrices(mlp.expert, f"{prefix}experts.{expert}.")
    if mlp.shared is not None:
        yield from _mlp_matrices(mlp.shared, f"{prefix}shared.")


def _state_matrices(state: StateSpec, prefix: str, packed_prefix: str) -> Iterator[MatrixParts]:
    if isinstance(state, GatedDeltaNetSpec):
        yield MatrixParts(f"{packed_prefix}qkv", tuple(f"{prefix}mixer.{name}" for name in "zqkv"))
        yield MatrixParts(f"{packed_prefix}steps", tuple(f"{prefix}mixer.{name}" for name in "ba"))
        yield MatrixParts(f"{packed_prefix}output", (f"{prefix}mixer.out",))
        return
    of_both = (state.bias, state.bias) if isinstance(state, ShortConvSpec) else (state.projection_bias, state.output_bias)
    for name, source, biased in zip(("qkv", "output"), ("in", "out"), of_both, strict=True):
        yield MatrixParts(packed_prefix + name, (f"{prefix}mixer.{source}",), biased=biased)


def _attention_matrices(attention: AnyAttentionSpec, prefix: str) -> Iterator[MatrixParts]:
    if isinstance(attention, LatentAttentionSpec):
        yield from _latent_matrices(attention, prefix)
    else:
        names = ["q"] if attention.shared_kv is not None else ["q", "k", "v"]
        names += ["q_gate"] if attention.gated else []
        yield MatrixParts(f"{prefix}qkv", tuple(prefix + name for name in names), biased=attention.qkv_bias)
    yield MatrixParts(f"{prefix}output", (f"{prefix}o",), biased=attention.output_bias)


def _latent_matrices(attention: LatentAttentionSpec, prefix: str) -> Iterator[MatrixParts]:
    queries = f"{prefix}q" if attention.q_lora_rank is None else f"{prefix}q_a"
    yield MatrixParts(f"{prefix}qkv", (queries, f"{prefix}kv_a"), biased=attention.qkv_bias, unbiased=f"{prefix}q")
    if attention.q_lora_rank is not None:
        yield MatrixParts(f"{prefix}queries", (f"{prefix}q_b",))
    for half in ("absorb", "expand"):
        yield MatrixParts(prefix + half, (f"{prefix}kv_b",), latent=attention)


def _mlp_matrices(mlp: MlpSpec, prefix: str) -> Iterator[MatrixParts]:
    ups = (f"{prefix}gate", f"{prefix}up") if mlp.gated else (f"{prefix}up",)
    yield MatrixParts(f"{prefix}up", ups, interleaved=mlp.gated, biased=mlp.bias)
    yield MatrixParts(f"{prefix}down", (f"{prefix}down",), biased=mlp.bias)


def vectors_of(spec: DecoderSpec) -> Iterator[tuple[str, int]]:
    """Yields (canonical name, length) of a decoder's vectors that are no part of a matrix, padded to what kernels read."""
    norms = [
        (f"layers.{number}.{name}", size) for number, layer in enumerate(spec.layers) for name, size in _norms(layer, spec)
    ]
    merging = [(name, spec.hidden_size) for name in MERGE_NORMS] if spec.merges_hidden else []
    for name, size in [("norm", spec.hidden_size), *merging, *norms]:
        yield f"{name}.weight", _padded(size, _LANES)
        if spec.norm_bias and not name.endswith(("q_norm", "k_norm", "a_norm")):
            yield f"{name}.bias", _padded(size, _LANES)
    if spec.head_bias and spec.tied_embeddings:
        yield "head.bias", _padded(spec.vocab_size, PANEL)
    if spec.streams is not None:
        yield from stream_vectors(spec.streams, spec.hidden_size, len(spec.layers))
    for number, layer in enumerate(spec.layers):
        if isinstance(layer.attention, AttentionSpec) and layer.attention.sinks:
            yield f"layers.{number}.attention.sinks", layer.attention.num_heads
        if isinstance(layer.mlp, MoeSpec) and layer.mlp.correction_bias:
            yield f"layers.{number}.router.e_score_correction_bias", _padded(layer.mlp.num_experts, _LANES)
        if isinstance(layer.state, ShortConvSpec):
            yield f"layers.{number}.mixer.conv.weight", layer.state.kernel_size * layer.state.size
            if layer.state.bias:
                yield f"layers.{number}.mixer.conv.bias", layer.state.size
        if isinstance(layer.state, Mamba2Spec):
            yield from ((f"layers.{number}.mixer.{name}", size) for name, size in _mamba2_vectors(layer.state))
        if isinstance(layer.state, GatedDeltaNetSpec):
            yield from ((f"layers.{number}.mixer.{name}", size) for name, size in _delta_net_vectors(layer.state))


def _mamba2_vectors(mamba: Mamba2Spec) -> Iterator[tuple[str, int]]:
    yield "conv.weight", mamba.kernel_size * mamba.conv_size
    if mamba.conv_bias:
        yield "conv.bias", mamba.conv_size
    yield from ((name, mamba.num_heads) for name in ("A_log", "D", "dt_bias"))
    if mamba.norm is not None:
        yield "norm.weight", _padded(mamba.inner_size, _LANES)


def _delta_net_vectors(net: GatedDeltaNetSpec) -> Iterator[tuple[str, int]]:
    yield "conv.weight", net.kernel_size * net.conv_size
    yield from ((name, net.num_value_heads) for name in ("A_log", "dt_bias"))
    yield "norm.weight", _padded(net.value_head_dim, _LANES)


def _norms(layer: LayerSpec, spec: DecoderSpec) -> Iterator[tuple[str, int]]:
    parts = [name for name, is_there in (("attention", layer.mixes), ("mlp", layer.mlp is not None)) if is_there]
    if layer.pre_norm:
        yield from ((f"{part}_norm", spec.hidden_size) for part in parts)
    if layer.post_norm:
        yield from ((f"{part}_post_norm", spec.hidden_size) for part in parts)
    attention = layer.attention
    if isinstance(attention, LatentAttentionSpec):
        yield "kv_a_norm", attention.kv_lora_rank
        if attention.q_lora_rank is not None:
            yield "q_a_norm", attention.q_lora_rank
    elif attention is not None and attention.qk_norm and attention.qk_norm_weighted:
        yield "q_norm", qk_norm_length(attention, attention.num_heads)
        if attention.shared_kv is None:
            yield "k_norm", qk_norm_length(attention, attention.num_kv_heads)


def qk_norm_length(attention: AttentionSpec, num_heads: int) -> int:
    """Returns how many numbers of q or k, which has so many heads, are normed together."""
    return attention.head_dim * (num_heads if attention.qk_norm_over == "projection" else 1)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def packed_model_bytes(spec: DecoderSpec, weights: Weights, dense: PackedKind) -> int:
    """Returns the bytes that `pack_model` will take, and a table of layer inputs; nothing large is read."""
    matrices = sum(_matrix_bytes(parts, weights, dense) for parts in matrices_of(spec))
    table = 0 if spec.streams is None else table_bytes(weights, dense)
    return matrices + table + sum(4 * length for _, length in vectors_of(spec))


def _matrix_bytes(parts: MatrixParts, weights: Weights, dense: PackedKind) -> int:
    if parts.latent is not None:
        outputs, inputs = parts.latent.kv_lora_rank, parts.latent.qk_nope_head_dim
        if parts.name.endswith("expand"):
            outputs, inputs = parts.latent.v_head_dim, outputs
        stacked = parts.latent.num_heads * _padded(outputs, PANEL)
        return packed_bytes([np.zeros((1, inputs), np.float32)], stacked, dense, has_bias=False)
    heights = [weights.shape(f"{name}.weight")[0] for name in parts.sources]
    rows = [_form_row(weights, f"{name}.weight", parts.exact) for name in parts.sources]
    outputs = _padded(heights[0], PANEL // 2) * 2 if parts.interleaved else sum(heights)
    return packed_bytes(rows, outputs, PackedKind.F32 if parts.exact else dense, has_bias=parts.biased)


def _form_row(weights: Weights, name: str, exact: bool) -> Tensor:
    form = None if exact else weights.form(name)
    return np.zeros((1, weights.shape(name)[1]), np.float32) if form is None else form


def pack_model(spec: DecoderSpec, weights: Weights, packer: Packer) -> PackedModel:
    """Packs a model tensor by tensor, so that beside the packed model only one packed matrix's tensors are in memory."""
    read = partial(read_rows, weights, orders=row_orders(spec))
    return PackedModel(
        matrices={parts.name: _pack_matrix(parts, read, packer) for parts in matrices_of(spec)},
        vectors={name: _vector(name, read(name), length) for name, length in vectors_of(spec)},
    )


def _pack_matrix(parts: MatrixParts, read: Callable[[str], Tensor], packer: Packer) -> PackedMatrix:
    tensors = [read(f"{name}.weight") for name in parts.sources]
    if parts.latent is not None:
        return packer.stack_heads(_take_half(parts, parts.latent, _row(tensors[0])))
    biases = [_row(read(f"{name}.bias")) if parts.biased and name != parts.unbiased else None for name in parts.sources]
    if parts.exact:
        return packer.join_exactly([_row(tensor) for tensor in tensors], biases)
    if parts.interleaved:
        return packer.interleave(tensors[0], tensors[1], biases)
    return packer.join(tensors, biases)


def _take_half(parts: MatrixParts, attention: LatentAttentionSpec, kv_b: FloatArray) -> FloatArray:
    """Returns what queries absorb, [num_heads, rank, plain part], or what expands latents, [num_heads, value, rank]."""
    heads = kv_b.reshape(attention.num_heads, -1, attention.kv_lora_rank)
    if parts.name.endswith("expand"):
        return heads[:, attention.qk_nope_head_dim :]
    return heads[:, : attention.qk_nope_head_dim].swapaxes(1, 2)


def _row(tensor: Tensor) -> FloatArray:
    return np.asarray(dequantized(tensor)).astype(np.float32)


def _vector(name: str, tensor: Tensor, length: int) -> npt.NDArray[Any]:
    values = _row(tensor)
    if name.endswith("conv.weight"):  # filters [channels, positions] become [positions, channels]
        values = values.T
    values = values.reshape(-1)
    return np.pad(values, (0, length - len(values)))
