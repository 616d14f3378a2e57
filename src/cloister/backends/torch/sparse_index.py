"""Which positions a query sees in sparse attention (`backends.spec.IndexSpec`): products row by row, then a choice by token.

A token's scores are computed in splits of 256 keys, in tiles of rows whose bits do not depend on the number of rows, and summed
over heads in the order of their numbers. So a token chooses the same positions in any chunk and company (batch invariance).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cloister.backends.base import ForwardBatch
from cloister.backends.spec import IndexSpec
from cloister.backends.torch.layers import rotate
from cloister.backends.torch.linear import cut_rows, measure_tiles, pad_rows
from cloister.backends.torch.reading import AnyLinear, WeightReader
from cloister.backends.torch.schedule import SPLIT, KeySlots, Team

_TOKENS_AT_ONCE = 8  # whose scores of all positions one thread holds


class IndexProjections:
    """What the choice reads, row by row.

    Attributes:
        linears: its products.
        num_operations: multiplications and additions of products with weights, for one row.
    """

    def __init__(self, spec: IndexSpec, reader: WeightReader, prefix: str) -> None:
        self._spec = spec
        self._queries = reader.linear(f"{prefix}.index_q", bias=False)
        self._keys = reader.linear(f"{prefix}.index_k", bias=False)
        self._weights = reader.linear(f"{prefix}.index_weights", bias=False, wide=True)
        self._norm = [reader.vector(f"{prefix}.index_k_norm.{name}") for name in ("weight", "bias")]
        self.linears: tuple[AnyLinear, ...] = (self._queries, self._keys, self._weights)
        self.num_operations = sum(linear.num_operations for linear in self.linears)

    def project(self, normed: Tensor, latents: Tensor, cos_sin: Tensor | None, features: Tensor, keys: Tensor) -> None:
        """Writes features [num_rows, num_features] (queries of each head, then a weight of each head) and keys [num_rows,
        head_dim].

        Args:
            normed: what attention reads, [num_rows, hidden].
            latents: of queries, after their norm, [num_rows, q_lora_rank].
        """
        spec = self._spec
        size = spec.num_heads * spec.head_dim
        heads = (len(features), spec.num_heads, spec.head_dim)
        turned = torch.empty(heads, device=features.device)
        rotate(self._queries(latents).view(heads), cos_sin, turned)
        features[:, :size] = turned.flatten(1)
        features[:, size:] = self._weights(normed).mul_((spec.num_heads * spec.head_dim) ** -0.5)
        found = F.layer_norm(self._keys(normed), (spec.head_dim,), *self._norm, spec.norm_eps)
        rotate(found.unsqueeze(1), cos_sin, keys.unsqueeze(1))


def choose_positions(
    spec: IndexSpec, features: Tensor, keys: Tensor, batch: ForwardBatch, slots: KeySlots, team: Team
) -> Tensor | None:
    """Returns the positions that each row may see, [num_rows, num_chosen]; positions behind its own mean nothing. None: all.

    Args:
        features: [num_rows, num_features] of a step (`IndexProjections.project`); rows past its tokens are padding.
        keys: [num_slots + 1, head_dim] of the cache, which contains those of the step.
        batch: without trees, its block tables those that `slots` were made of.
    """
    if int(batch.context_lens.max()) <= spec.num_chosen:
        return None
    chosen = torch.arange(spec.num_chosen, device=features.device).repeat(len(features), 1)
    parts = list(_cut_tokens(batch, spec.num_chosen))
    tasks = [partial(_choose, spec, features, keys, batch, slots, chosen, *part) for part in parts]
    pairs = sum((end - start) * int(batch.positions[end - 1] + 1) for _, start, end in parts)
    team.run(tasks, 2.0 * pairs * spec.num_heads * spec.head_dim)
    return chosen


def _cut_tokens(batch: ForwardBatch, num_chosen: int) -> Iterator[tuple[int, int, int]]:
    """Yields (sequence, first token, end token) of tokens of which some see more positions than they may choose."""
    for seq, (begin, end) in enumerate(zip(batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist(), strict=True)):
        for start in range(begin, end, _TOKENS_AT_ONCE):
            stop = min(start + _TOKENS_AT_ONCE, end)
            if batch.positions[stop - 1] >= num_chosen:
                yield seq, start, stop


def _choose(
    spec: IndexSpec,
    features: Tensor,
    keys: Tensor,
    batch: ForwardBatch,
    slots: KeySlots,
    chosen: Tensor,
    seq: int,
    start: int,
    end: int,
) -> None:
    """Writes the best positions of tokens [start, end) of one sequence; of equal ones the earlier."""
    num_tokens, size = end - start, spec.num_heads * spec.head_dim
    positions = torch.from_numpy(batch.positions[start:end].astype(np.int64)).to(keys.device)
    num_splits = int(batch.positions[end - 1]) // SPLIT + 1
    tiles = _index_tiles(spec.head_dim, keys.device)
    queries = features[start:end, :size].reshape(-1, spec.head_dim)
    rows = queries.new_zeros(pad_rows(len(queries), tiles), spec.head_dim)
    rows[: len(queries)] = queries
    weights = features[start:end, size:]
    scores = rows.new_empty(num_tokens, num_splits * SPLIT)
    for split in range(num_splits):
        places = torch.from_numpy(slots.slots[slots.starts[seq] + split]).to(keys.device)
        found = keys.index_select(0, places).float().t().contiguous()
        products = torch.cat([torch.mm(rows[top:bottom], found) for top, bottom in cut_rows(len(rows), tiles)])
        heads = products[: len(queries)].view(num_tokens, spec.num_heads, SPLIT).relu_()
        total = heads[:, 0] * weights[:, :1]
        for head in range(1, spec.num_heads):
            total += heads[:, head] * weights[:, head : head + 1]
        scores[:, split * SPLIT : (split + 1) * SPLIT] = total
    later = torch.arange(scores.shape[1], device=keys.device) > positions.unsqueeze(1)
    ranked = scores.masked_fill_(later, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    chosen[start:end] = ranked[:, : spec.num_chosen]


@cache
def _index_tiles(head_dim: int, device: torch.device) -> tuple[int, ...]:
    """Returns how many rows may be multiplied by the keys of a split at once (`linear.measure_tiles`)."""
    generator = torch.Generator().manual_seed(head_dim)
    keys = torch.randn(head_dim, SPLIT, generator=generator).to(device)
    return measure_tiles(lambda rows: torch.mm(rows, keys), head_dim, torch.float32, device)
