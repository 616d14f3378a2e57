"""Multi-head latent attention in absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

Every position is computed so, in prefill too: expanding the latents of a prompt into keys and values is quicker there, but sums
in another order, and a row's bits would depend on how its prompt was cut (batch invariance).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cloister.backends.spec import LatentAttentionSpec
from cloister.backends.torch.adapters import RowAdapters
from cloister.backends.torch.layers import rms_norm, rotate
from cloister.backends.torch.linear import FEWEST_COLUMNS, cut_rows, measure_tiles
from cloister.backends.torch.reading import AnyLinear, WeightReader
from cloister.backends.torch.sparse_index import IndexProjections


class HeadwiseLinear:
    """y = x W for each head, with a matrix of its own.

    Args:
        weight: [num_heads, inputs, outputs].
    """

    def __init__(self, weight: Tensor) -> None:
        num_heads, num_inputs, self._num_outputs = weight.shape
        padding = max(0, FEWEST_COLUMNS - self._num_outputs)
        self._weight = torch.nn.functional.pad(weight, (0, padding)).contiguous()
        self.num_operations = 2.0 * num_heads * num_inputs * self._num_outputs
        self.tiles = headwise_tiles(*self._weight.shape, weight.dtype, weight.device)

    def __call__(self, heads: Tensor) -> Tensor:
        """Returns [num_rows, num_heads, outputs] for [num_rows, num_heads, inputs]; num_rows as `tiles.pad_rows` gives.

        Both are float32; the product itself is computed in the weight's own type.
        """
        rows = heads.to(self._weight.dtype).transpose(0, 1)
        parts = [torch.bmm(rows[:, top:end].contiguous(), self._weight) for top, end in cut_rows(len(heads), self.tiles)]
        return torch.cat(parts, dim=1)[..., : self._num_outputs].transpose(0, 1).float()


@cache
def headwise_tiles(
    num_heads: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Returns the tile sizes that agree for products of this shape, on this machine."""
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_heads, num_inputs, num_outputs, generator=generator).to(device, dtype)

    def multiply(rows: Tensor) -> Tensor:
        return torch.bmm(rows.expand(num_heads, -1, -1).contiguous(), weight).transpose(0, 1)

    return measure_tiles(multiply, num_inputs, dtype, device)


class LatentProjections:
    """What goes into latent attention and comes out of it, row by row (`decoder.GroupedProjections` for other kinds).

    An adapter may change q, q_a, q_b and kv_a. kv_b is no product of its own here, and stays in numbers.

    Attributes:
        linears: its products.
        num_operations: multiplications and additions of products with weights before attention, for one row.
        num_output_operations: those after it.
    """

    def __init__(self, spec: LatentAttentionSpec, reader: WeightReader, prefix: str) -> None:
        self._spec, self._prefix = spec, prefix
        self._names = ("q",) if spec.q_lora_rank is None else ("q_a", "q_b")
        biases = (False,) if spec.q_lora_rank is None else (spec.qkv_bias, False)
        self._queries: list[AnyLinear] = [
            reader.linear(f"{prefix}.{name}", bias=bias) for name, bias in zip(self._names, biases, strict=True)
        ]
        self._kv_a = reader.linear(f"{prefix}.kv_a", bias=spec.qkv_bias)
        self._q_norm = None if spec.q_lora_rank is None else reader.vector(f"{prefix}.q_a_norm.weight")
        self._kv_norm = reader.vector(f"{prefix}.kv_a_norm.weight")
        kv_b = reader.matrix(f"{prefix}.kv_b").view(spec.num_heads, -1, spec.kv_lora_rank)
        self._absorb = HeadwiseLinear(kv_b[:, : spec.qk_nope_head_dim])
        self._expand = HeadwiseLinear(kv_b[:, spec.qk_nope_head_dim :].transpose(1, 2))
        self._index = None if spec.index is None else IndexProjections(spec.index, reader, prefix)
        of_index = () if self._index is None else self._index.linears
        self.linears: tuple[AnyLinear | HeadwiseLinear, ...] = (
            *self._queries,
            self._kv_a,
            self._absorb,
            *of_index,
            self._expand,
        )
        self.num_operations = sum(linear.num_operations for linear in self.linears[:-1])
        self.num_output_operations = self._expand.num_operations

    def project(
        self,
        normed: Tensor,
        cos_sin: Tensor | None,
        queries: Tensor,
        slots: Tensor,
        adapters: RowAdapters | None,
        index_features: Tensor | None = None,
    ) -> None:
        """Writes queries [num_rows, num_heads, head_dim], scaled, and slots [num_rows, size]: latent, rotated key, and the key
        of the index where there is one.

        Args:
            cos_sin: [2, num_rows, 1, num_frequencies], None where nothing is turned.
            index_features: [num_rows, num_features], written too (`sparse_index.IndexProjections`); None without an index.
        """
        spec, rank = self._spec, self._spec.kv_lora_rank
        interleaved = spec.rope is not None and spec.rope.interleaved
        projected, read = self._project_queries(normed, adapters)
        heads = projected.view(len(normed), spec.num_heads, spec.qk_head_dim)
        plain, turned = heads[..., : spec.qk_nope_head_dim], heads[..., spec.qk_nope_head_dim :]
        queries[..., :rank] = self._absorb(plain)
        rotate(turned, cos_sin, queries[..., rank:], interleaved=interleaved)
        queries.mul_(spec.scale)
        latents = self._kv_a(normed)
        if adapters is not None:
            adapters.add(self._prefix, ("kv_a",), normed, latents)
        slots[:, :rank] = rms_norm(latents[:, :rank], self._kv_norm, spec.latent_norm_eps)
        rotate(latents[:, None, rank:], cos_sin, slots[:, None, rank : spec.head_dim], interleaved=interleaved)
        if self._index is not None and index_features is not None:
            self._index.project(normed, read, cos_sin, index_features, slots[:, spec.head_dim :])

    def join(self, mixed: Tensor) -> Tensor:
        """Returns what the output projection reads, [num_rows, num_heads * v_head_dim].

        Args:
            mixed: [num_rows, num_heads * kv_lora_rank] weighted latents of each head.
        """
        return self._expand(mixed.view(len(mixed), self._spec.num_heads, -1)).flatten(1)

    def _project_queries(self, rows: Tensor, adapters: RowAdapters | None) -> tuple[Tensor, Tensor]:
        """Returns the queries, and what their last product read."""
        read = rows
        for name, linear in zip(self._names, self._queries, strict=True):
            if name == "q_b" and self._q_norm is not None:
                rows = rms_norm(rows, self._q_norm, self._spec.latent_norm_eps)
            out = linear(rows)
            if adapters is not None:
                adapters.add(self._prefix, (name,), rows, out)
            read, rows = rows, out
        return rows, read
