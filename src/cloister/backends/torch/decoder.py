"""A block of a decoder in torch, built from a spec and its weights."""

from __future__ import annotations

from torch import Tensor

from cloister.backends.spec import DecoderSpec
from cloister.backends.torch.adapters import RowAdapters
from cloister.backends.torch.feed_forward import make_feed_forward
from cloister.backends.torch.layers import Norm, rms_norm, rotate
from cloister.backends.torch.reading import AnyLinear, WeightReader


class DecoderLayer:
    """One block of the decoder, all but attention itself: what is computed row by row.

    Attributes:
        project_operations, finish_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(self, spec: DecoderSpec, number: int, reader: WeightReader) -> None:
        self._prefix = prefix = f"layers.{number}"
        self._spec = spec.layers[number]
        self.attention = attention = self._spec.attention
        self._eps = spec.norm_eps

        def norm(name: str, wanted: bool) -> Norm | None:
            return reader.norm(f"{prefix}.{name}", spec) if wanted else None

        self._attention_norm = norm("attention_norm", self._spec.pre_norm)
        self._attention_post_norm = norm("attention_post_norm", self._spec.post_norm)
        self._mlp_norm = norm("mlp_norm", self._spec.pre_norm)
        self._mlp_post_norm = norm("mlp_post_norm", self._spec.post_norm)
        self._qkv = reader.linear(*(f"{prefix}.{name}" for name in "qkv"), bias=attention.qkv_bias)
        self._o = reader.linear(f"{prefix}.o", bias=attention.output_bias)
        self._mlp = make_feed_forward(self._spec.mlp, reader, prefix)
        names = ("q_norm", "k_norm") if attention.qk_norm else ()
        self._qk_norms = [reader.vector(f"{prefix}.{name}.weight") for name in names]
        self.linears: tuple[AnyLinear, ...] = (self._qkv, self._o, *self._mlp.linears)
        self.project_operations = self._qkv.num_operations
        self.finish_operations = self._o.num_operations + self._mlp.num_operations

    def project(
        self,
        hidden: Tensor,
        cos_sin: Tensor | None,
        queries: Tensor,
        keys_values: Tensor,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and keys and values [num_rows, 2, num_kv_heads, head_dim].

        Args:
            cos_sin: [2, num_rows, 1, num_frequencies], None where nothing is turned.
        """
        spec = self.attention
        normed = _apply(self._attention_norm, hidden)
        projected = self._qkv(normed)
        if adapters is not None:
            adapters.add(self._prefix, "qkv", normed, projected)
        heads = projected.view(hidden.shape[0], -1, spec.head_dim)
        query, key, value = heads.tensor_split((spec.num_heads, spec.num_heads + spec.num_kv_heads), dim=1)
        if spec.qk_norm:
            query, key = (self._norm_heads(part, weight) for part, weight in zip((query, key), self._qk_norms, strict=True))
        rotate(query, cos_sin, queries)
        queries.mul_(spec.scale)
        rotate(key, cos_sin, keys_values[:, 0])
        keys_values[:, 1] = value

    def finish(self, hidden: Tensor, mixed: Tensor, adapters: RowAdapters | None = None) -> None:
        """Adds the outputs of attention [num_rows, num_heads * head_dim] and of the feed-forward to `hidden`, in place."""
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

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        if self.attention.qk_norm_over == "head":
            return rms_norm(heads, weight, self._eps)
        return rms_norm(heads.flatten(1), weight, self._eps).view(heads.shape)


def _apply(norm: Norm | None, rows: Tensor) -> Tensor:
    return rows if norm is None else norm(rows)
