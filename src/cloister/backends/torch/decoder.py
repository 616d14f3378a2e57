"""A block of a decoder in torch, built from a spec and its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from cloister.backends.spec import AnyAttentionSpec, AttentionSpec, DecoderSpec, LatentAttentionSpec
from cloister.backends.torch.adapters import RowAdapters
from cloister.backends.torch.feed_forward import make_feed_forward
from cloister.backends.torch.latent import HeadwiseLinear, LatentProjections
from cloister.backends.torch.layers import Norm, on_whole_vectors, rms_norm, rotate
from cloister.backends.torch.mixers import make_mixer
from cloister.backends.torch.reading import AnyLinear, WeightReader


class GroupedProjections:
    """What goes into grouped-query attention and comes out of it, row by row; attributes as in `LatentProjections`."""

    def __init__(self, spec: AttentionSpec, reader: WeightReader, prefix: str, eps: float) -> None:
        self._spec, self._prefix, self._eps = spec, prefix, eps
        self._names = "qkv" if spec.shared_kv is None else "q"
        self._qkv = reader.linear(*(f"{prefix}.{name}" for name in self._names), bias=spec.qkv_bias)
        names = [f"{name}_norm" for name in self._names if name != "v"] if spec.qk_norm else []
        self._qk_norms = [reader.vector(f"{prefix}.{name}.weight") if spec.qk_norm_weighted else None for name in names]
        self.sinks = reader.vector(f"{prefix}.attention.sinks") if spec.sinks else None
        self.linears: tuple[AnyLinear, ...] = (self._qkv,)
        self.num_operations, self.num_output_operations = self._qkv.num_operations, 0.0

    def project(
        self, normed: Tensor, cos_sin: Tensor | None, queries: Tensor, slots: Tensor, adapters: RowAdapters | None
    ) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and slots [num_rows, size]: keys, then values. Slots of a
        layer that reads the KV of an earlier one are empty."""
        spec = self._spec
        interleaved = spec.rope is not None and spec.rope.interleaved
        projected = self._qkv(normed)
        if adapters is not None:
            adapters.add(self._prefix, self._names, normed, projected)
        heads = projected.view(len(normed), -1, spec.head_dim)
        query, key, value = heads.tensor_split((spec.num_heads, spec.num_heads + spec.num_kv_heads), dim=1)
        rotate(self._norm_heads(query, 0), cos_sin, queries, interleaved=interleaved)
        queries.mul_(spec.scale)
        if spec.shared_kv is not None:
            return
        keys_values = slots.view(len(slots), 2, spec.num_kv_heads, spec.head_dim)
        rotate(self._norm_heads(key, 1), cos_sin, keys_values[:, 0], interleaved=interleaved)
        keys_values[:, 1] = rms_norm(value, None, self._eps) if spec.v_norm else value

    def join(self, mixed: Tensor) -> Tensor:
        """Returns what the output projection reads."""
        return mixed

    def _norm_heads(self, heads: Tensor, number: int) -> Tensor:
        """Returns the queries (0) or keys (1) [num_rows, num_heads, head_dim] normalised, where they are."""
        if not self._spec.qk_norm:
            return heads
        weight = self._qk_norms[number]
        if self._spec.qk_norm_over == "head":
            return rms_norm(heads, weight, self._eps)
        return rms_norm(heads.flatten(1), weight, self._eps).view(heads.shape)


class SelfAttention:
    """All of attention that is computed row by row.

    Attributes:
        linears: its products.
        num_operations: multiplications and additions of products with weights before attention, for one row.
        num_output_operations: those after it.
        sinks: [num_heads], or None.
        is_gated: `finish` reads the normed rows again.
    """

    def __init__(self, spec: AnyAttentionSpec, reader: WeightReader, prefix: str, eps: float) -> None:
        self._prefix = prefix
        self._projections = (
            LatentProjections(spec, reader, prefix)
            if isinstance(spec, LatentAttentionSpec)
            else GroupedProjections(spec, reader, prefix, eps)
        )
        self._o = reader.linear(f"{prefix}.o", bias=spec.output_bias)
        self.sinks = self._projections.sinks if isinstance(self._projections, GroupedProjections) else None
        self._gate: AnyLinear | None = None
        self._input_scale = self._output_scale = 1.0
        if isinstance(spec, AttentionSpec):
            self._gate = reader.linear(f"{prefix}.q_gate", bias=spec.qkv_bias) if spec.gated else None
            self._input_scale, self._output_scale = spec.input_scale, spec.output_scale
        self.is_gated = self._gate is not None
        gates = () if self._gate is None else (self._gate,)
        self.linears: tuple[AnyLinear | HeadwiseLinear, ...] = (*self._projections.linears, *gates, self._o)
        self.num_operations = self._projections.num_operations
        self.num_output_operations = self._projections.num_output_operations + sum(
            linear.num_operations for linear in (*gates, self._o)
        )

    def project(
        self,
        normed: Tensor,
        cos_sin: Tensor | None,
        queries: Tensor,
        slots: Tensor,
        adapters: RowAdapters | None,
        index_features: Tensor | None = None,
    ) -> None:
        """Writes queries and slots (`LatentProjections.project`)."""
        if isinstance(self._projections, LatentProjections):
            self._projections.project(normed, cos_sin, queries, slots, adapters, index_features)
        else:
            self._projections.project(self._scaled(normed), cos_sin, queries, slots, adapters)

    def finish(self, normed: Tensor | None, mixed: Tensor, adapters: RowAdapters | None) -> Tensor:
        """Returns [num_rows, hidden] for the outputs of attention [num_rows, num_heads * value_dim].

        Args:
            normed: what `project` read, where the attention is gated; gates are computed here, so that nobody keeps them.
        """
        mixed = self._projections.join(mixed)
        if self._gate is not None and normed is not None:
            mixed = self._gates(self._scaled(normed), self._gate, adapters) * mixed
        output = self._o(mixed)
        if adapters is not None:
            adapters.add(self._prefix, "o", mixed, output)
        return output if self._output_scale == 1.0 else output.mul_(self._output_scale)

    def _gates(self, rows: Tensor, gate: AnyLinear, adapters: RowAdapters | None) -> Tensor:
        gates = gate(rows)
        if adapters is not None:
            adapters.add(self._prefix, ("q_gate",), rows, gates)
        return on_whole_vectors(torch.sigmoid, gates)

    def _scaled(self, normed: Tensor) -> Tensor:
        return normed if self._input_scale == 1.0 else normed * self._input_scale


class DecoderLayer:
    """One block of the decoder without its token mixer: everything that is computed row by row.

    Attributes:
        attention: None where the layer has none.
        mixer: its mixer with a state, None where it has none. A step calls its `advance` between `project` and `finish`.
        sinks: [num_heads] of its attention, or None.
        project_operations, finish_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(self, spec: DecoderSpec, number: int, reader: WeightReader) -> None:
        prefix = f"layers.{number}"
        self._spec = layer = spec.layers[number]
        self.attention = layer.attention

        def norm(name: str, wanted: bool) -> Norm | None:
            return reader.norm(f"{prefix}.{name}", spec) if wanted else None

        feeds = layer.mlp is not None
        self._attention_norm = norm("attention_norm", layer.pre_norm and layer.mixes)
        self._attention_post_norm = norm("attention_post_norm", layer.post_norm and layer.mixes)
        self._mlp_norm = norm("mlp_norm", layer.pre_norm and feeds)
        self._mlp_post_norm = norm("mlp_post_norm", layer.post_norm and feeds)
        self._attend = None if layer.attention is None else SelfAttention(layer.attention, reader, prefix, spec.norm_eps)
        self.mixer = None if layer.state is None else make_mixer(layer.state, reader, prefix, spec.norm_eps)
        self._mlp = None if layer.mlp is None else make_feed_forward(layer.mlp, reader, prefix)
        mixers = [part for part in (self._attend, self.mixer) if part is not None]
        feed_forwards = [] if self._mlp is None else [self._mlp]
        self.linears: tuple[AnyLinear | HeadwiseLinear, ...] = tuple(
            linear for part in (*mixers, *feed_forwards) for linear in part.linears
        )
        self.project_operations = sum(part.num_operations for part in mixers)
        self.finish_operations = sum(part.num_output_operations for part in mixers) + sum(
            part.num_operations for part in feed_forwards
        )
        self.sinks = None if self._attend is None else self._attend.sinks

    def project(
        self,
        hidden: Tensor,
        cos_sin: Tensor | None,
        queries: Tensor | None,
        slots: Tensor | None,
        adapters: RowAdapters | None = None,
        features: Tensor | None = None,
        index_features: Tensor | None = None,
    ) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and the slots of the cache [num_rows, size].

        Args:
            cos_sin: [2, num_rows, 1, num_frequencies], None where nothing is turned.
            queries, slots: None in a layer without attention.
            features: [num_rows, mixer.num_features], written too; None in a layer without a mixer.
            index_features: [num_rows, num_features] of a sparse index, written too; None in a layer without one.
        """
        if not self._spec.mixes:
            return
        normed = _apply(self._attention_norm, hidden)
        if self._attend is not None and queries is not None and slots is not None:
            self._attend.project(normed, cos_sin, queries, slots, adapters, index_features)
        if self.mixer is not None and features is not None:
            features.copy_(self.mixer.project(normed))

    def finish(
        self,
        hidden: Tensor,
        mixed: Tensor | None,
        adapters: RowAdapters | None = None,
        state_mixed: Tensor | None = None,
        layer_inputs: Tensor | None = None,
    ) -> None:
        """Adds the outputs of what mixes tokens and of the feed-forward to `hidden`, in place.

        Args:
            hidden: as `project` read it.
            mixed: outputs of attention [num_rows, num_heads * value_dim]; None in a layer without attention.
            state_mixed: outputs of the mixer [num_rows, mixer.num_mixed]; None in a layer without one.
            layer_inputs: of a layer with several streams (`streams.StreamLayer`); None for others.
        """
        attended = self._join(hidden, mixed, state_mixed, adapters)
        if self._spec.parallel:
            fed = self._feed(hidden, adapters)
            self._add(hidden, attended)
        else:
            self._add(hidden, attended)
            fed = self._feed(hidden, adapters)
        self._add(hidden, fed)

    def _join(
        self, hidden: Tensor, mixed: Tensor | None, state_mixed: Tensor | None, adapters: RowAdapters | None
    ) -> Tensor | None:
        """Returns what the parts that mix tokens add, [num_rows, hidden]; None where there are none."""
        output = None
        if self._attend is not None and mixed is not None:
            normed = _apply(self._attention_norm, hidden) if self._attend.is_gated else None
            output = self._attend.finish(normed, mixed, adapters)
        if self.mixer is not None and state_mixed is not None:
            found = self.mixer.finish(state_mixed)
            output = found if output is None else output.add_(found)
        return None if output is None else _apply(self._attention_post_norm, output)

    def _feed(self, hidden: Tensor, adapters: RowAdapters | None) -> Tensor | None:
        if self._mlp is None:
            return None
        return _apply(self._mlp_post_norm, self._mlp(_apply(self._mlp_norm, hidden), adapters))

    def _add(self, hidden: Tensor, output: Tensor | None) -> None:
        if output is not None:
            hidden.add_(output if self._spec.residual_scale == 1.0 else output * self._spec.residual_scale)


def _apply(norm: Norm | None, rows: Tensor) -> Tensor:
    return rows if norm is None else norm(rows)
