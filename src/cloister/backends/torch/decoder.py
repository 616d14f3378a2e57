"""A block of a decoder in torch, built from a spec and its weights."""

from __future__ import annotations

from torch import Tensor

from cloister.backends.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec
from cloister.backends.torch.adapters import RowAdapters
from cloister.backends.torch.feed_forward import make_feed_forward
from cloister.backends.torch.latent import HeadwiseLinear, LatentProjections
from cloister.backends.torch.layers import Norm, rms_norm, rotate
from cloister.backends.torch.reading import AnyLinear, WeightReader


class GroupedProjections:
    """What goes into grouped-query attention and comes out of it, row by row; attributes as in `LatentProjections`."""

    def __init__(self, spec: AttentionSpec, reader: WeightReader, prefix: str, eps: float) -> None:
        self._spec, self._prefix, self._eps = spec, prefix, eps
        self._qkv = reader.linear(*(f"{prefix}.{name}" for name in "qkv"), bias=spec.qkv_bias)
        names = ("q_norm", "k_norm") if spec.qk_norm else ()
        self._qk_norms = [reader.vector(f"{prefix}.{name}.weight") if spec.qk_norm_weighted else None for name in names]
        self.sinks = reader.vector(f"{prefix}.attention.sinks") if spec.sinks else None
        self.linears: tuple[AnyLinear, ...] = (self._qkv,)
        self.num_operations, self.num_output_operations = self._qkv.num_operations, 0.0

    def project(
        self, normed: Tensor, cos_sin: Tensor | None, queries: Tensor, slots: Tensor, adapters: RowAdapters | None
    ) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and slots [num_rows, size]: keys, then values."""
        spec = self._spec
        interleaved = spec.rope is not None and spec.rope.interleaved
        projected = self._qkv(normed)
        if adapters is not None:
            adapters.add(self._prefix, "qkv", normed, projected)
        heads = projected.view(len(normed), -1, spec.head_dim)
        query, key, value = heads.tensor_split((spec.num_heads, spec.num_heads + spec.num_kv_heads), dim=1)
        if spec.qk_norm:
            query, key = (self._norm_heads(part, weight) for part, weight in zip((query, key), self._qk_norms, strict=True))
        keys_values = slots.view(len(slots), 2, spec.num_kv_heads, spec.head_dim)
        rotate(query, cos_sin, queries, interleaved=interleaved)
        queries.mul_(spec.scale)
        rotate(key, cos_sin, keys_values[:, 0], interleaved=interleaved)
        keys_values[:, 1] = value

    def join(self, mixed: Tensor) -> Tensor:
        """Returns what the output projection reads."""
        return mixed

    def _norm_heads(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        if self._spec.qk_norm_over == "head":
            return rms_norm(heads, weight, self._eps)
        return rms_norm(heads.flatten(1), weight, self._eps).view(heads.shape)


class DecoderLayer:
    """One block of the decoder, all but attention itself: what is computed row by row.

    Attributes:
        sinks: [num_heads] of its attention, or None.
        project_operations, finish_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(self, spec: DecoderSpec, number: int, reader: WeightReader) -> None:
        self._prefix = prefix = f"layers.{number}"
        self._spec = spec.layers[number]
        self.attention = attention = self._spec.attention

        def norm(name: str, wanted: bool) -> Norm | None:
            return reader.norm(f"{prefix}.{name}", spec) if wanted else None

        self._attention_norm = norm("attention_norm", self._spec.pre_norm)
        self._attention_post_norm = norm("attention_post_norm", self._spec.post_norm)
        self._mlp_norm = norm("mlp_norm", self._spec.pre_norm)
        self._mlp_post_norm = norm("mlp_post_norm", self._spec.post_norm)
        self._projections = (
            LatentProjections(attention, reader, prefix)
            if isinstance(attention, LatentAttentionSpec)
            else GroupedProjections(attention, reader, prefix, spec.norm_eps)
        )
        self.sinks = self._projections.sinks if isinstance(self._projections, GroupedProjections) else None
        self._o = reader.linear(f"{prefix}.o", bias=attention.output_bias)
        self._mlp = make_feed_forward(self._spec.mlp, reader, prefix)
        self.linears: tuple[AnyLinear | HeadwiseLinear, ...] = (*self._projections.linears, self._o, *self._mlp.linears)
        self.project_operations = self._projections.num_operations
        self.finish_operations = self._projections.num_output_operations + self._o.num_operations + self._mlp.num_operations

    def project(
        self,
        hidden: Tensor,
        cos_sin: Tensor | None,
        queries: Tensor,
        slots: Tensor,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and the slots of the cache [num_rows, size].

        Args:
            cos_sin: [2, num_rows, 1, num_frequencies], None where nothing is turned.
        """
        self._projections.project(_apply(self._attention_norm, hidden), cos_sin, queries, slots, adapters)

    def finish(self, hidden: Tensor, mixed: Tensor, adapters: RowAdapters | None = None) -> None:
        """Adds the outputs of attention [num_rows, num_heads * value_dim] and of the feed-forward to `hidden`, in place."""
        mixed = self._projections.join(mixed)
        output = self._o(mixed)
        if adapters is not None:
            adapters.add(self._prefix, "o", mixed, output)
        attended = _apply(self._attention_post_norm, output)
        if self._spec.parallel:
            fed = self._feed(hidden, adapters)
            self._add(hidden, attended)
        else:
            self._add(hidden, attended)
            fed = self._feed(hidden, adapters)
        self._add(hidden, fed)

    def _feed(self, hidden: Tensor, adapters: RowAdapters | None) -> Tensor:
        return _apply(self._mlp_post_norm, self._mlp(_apply(self._mlp_norm, hidden), adapters))

    def _add(self, hidden: Tensor, output: Tensor) -> None:
        hidden.add_(output if self._spec.residual_scale == 1.0 else output * self._spec.residual_scale)


def _apply(norm: Norm | None, rows: Tensor) -> Tensor:
    return rows if norm is None else norm(rows)
