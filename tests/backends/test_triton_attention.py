"""The attention kernels against plain attention in float64, and against themselves cut otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cloister.backends.torch.cuda.work import ITEM_FIELDS, JOIN_FIELDS
from tests.device import DEVICE, HAS_TRITON, needs_triton
from tests.thinning import thin

if HAS_TRITON:
    from cloister.backends.torch.triton.attention import Heads, Pages, Tiles, attend, make_partials
    from cloister.backends.torch.triton.matmul import join_splits

pytestmark = needs_triton
TILES = {"large": 64, "small": 16}
SPLIT = 256


@dataclass
class Case:
    """Sequences in a shuffled pool, with random queries, keys and values."""

    heads: Any
    lengths: tuple[tuple[int, int], ...]  # (queries, context) of each sequence
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        heads, size = self.heads, self.block_size
        counts = [-(-context // size) for _, context in self.lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).int()
        tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, count, start in zip(tables, counts, torch.tensor([0, *counts]).cumsum(0).tolist(), strict=False):
            row[:count] = order[start : start + count]
        starts = torch.tensor([0, *(queries for queries, _ in self.lengths)]).cumsum(0).int()
        contexts = torch.tensor([context for _, context in self.lengths], dtype=torch.int32)
        self.num_tokens = int(starts[-1])
        slots = torch.randn(len(order) * size + 1, 2 * heads.num_kv_heads * heads.head_dim, generator=generator)
        queries = torch.randn(self.num_tokens, heads.num_heads, heads.head_dim, generator=generator) * heads.head_dim**-0.5
        self.slots, self.queries = slots.to(DEVICE, self.dtype), queries.to(DEVICE, self.dtype)
        self.pages = Pages(tables.to(DEVICE), starts.to(DEVICE), contexts.to(DEVICE), size)

    def expected(self) -> Tensor:
        """[num_tokens, num_heads, head_dim] in float64; weights are powers of two, as the kernels take them."""
        out = []
        for seq, (num_queries, context) in enumerate(self.lengths):
            positions = torch.arange(context)
            blocks = self.pages.tables[seq].cpu()[positions // self.block_size].long()
            kept = self.slots.cpu()[blocks * self.block_size + positions % self.block_size].double()
            kept = kept.view(context, 2, self.heads.num_kv_heads, self.heads.head_dim)
            kept = kept.repeat_interleave(self.heads.group, 2)
            begin = int(self.pages.query_starts[seq])
            query = self.queries[begin : begin + num_queries].cpu().double()
            scores = torch.einsum("qhd,khd->hqk", query, kept[:, 0])
            distance = torch.arange(context - num_queries, context)[:, None] - positions
            hidden = (distance < 0) | ((distance >= self.heads.window) if self.heads.window else torch.tensor(False))
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf) * torch.log(torch.tensor(2.0).double()), -1)
            out.append(torch.einsum("hqk,khd->qhd", weights, kept[:, 1]))
        return torch.cat(out)

    def run(self, *, cut: bool = False, kind: str | None = None, binding: str = "interleaved", num_places: int = 3) -> Tensor:
        """Computes all rows. `cut` makes each split an item; `kind` makes every tile large or small."""
        items: dict[str, list[list[int]]] = {"large": [], "small": []}
        joins: list[list[int]] = []
        num_partial = 0
        for seq, (num_queries, context) in enumerate(self.lengths):
            num_rows = num_queries * self.heads.group
            size = kind or ("small" if num_rows <= TILES["small"] else "large")
            for row in range(0, num_rows, TILES[size]):
                end = min(row + TILES[size], num_rows)
                last = context - num_queries + (end - 1) // self.heads.group
                num_splits = last // SPLIT + 1
                if not cut:
                    items[size].append([seq, row, 0, num_splits, -1])
                    continue
                stride = end - row
                items[size] += [[seq, row, s, s + 1, num_partial + s * stride] for s in range(num_splits)]
                joins += [[seq, row + part, num_partial + part, stride, num_splits] for part in range(0, stride, 16)]
                num_partial += num_splits * stride
        out = torch.full_like(self.queries, torch.nan)
        partials = make_partials(max(num_partial, 1), self.heads, out.device)
        large, small = (torch.tensor(items[size], dtype=torch.int32).view(-1, ITEM_FIELDS) for size in TILES)
        attend(
            self.queries, self.slots, self.pages, large.to(DEVICE), small.to(DEVICE), out, partials, heads=self.heads,
            tiles=Tiles(**TILES, num_warps=4), counters=torch.zeros(2 + num_places, dtype=torch.int32, device=DEVICE),
            binding=binding,
        )  # fmt: skip
        entries = torch.tensor(joins, dtype=torch.int32).view(-1, JOIN_FIELDS)
        join_splits(entries.to(DEVICE), self.pages, out, partials, self.heads)
        return out.cpu()


def heads(num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, window: int = 0) -> Any:
    return Heads(num_heads, num_kv_heads, head_dim, window)


def largest_error(case: Case, **how: Any) -> float:
    return float((case.run(**how).double() - case.expected()).abs().max())


@pytest.mark.parametrize("context", [1, 63, 64, 256, 257, 600])
def test_decode_reads_contexts_of_any_length(context: int) -> None:
    assert largest_error(Case(heads(), ((1, context),))) < 2e-6


@pytest.mark.parametrize(("queries", "context"), [(5, 5), (40, 300), (70, 70), (33, 530)])
def test_prefill_sees_what_came_before_each_token(queries: int, context: int) -> None:
    assert largest_error(Case(heads(), ((queries, context),))) < 2e-6


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 256])
def test_pages_of_any_size_are_followed(block_size: int) -> None:
    assert largest_error(Case(heads(), ((9, 270), (1, 140)), block_size)) < 2e-6


@pytest.mark.parametrize("shape", [(4, 4, 16), (7, 1, 24), (6, 2, 80), (16, 1, 32)])
def test_groups_and_head_sizes_that_fill_no_tile(shape: tuple[int, int, int]) -> None:
    assert largest_error(Case(heads(*shape), ((11, 70), (1, 300)))) < 2e-6


@pytest.mark.parametrize("window", [1, 50, 64, 300])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    assert largest_error(Case(heads(window=window), ((20, 400), (1, 600), (1, 10)))) < 2e-6


def test_bfloat16_is_close() -> None:
    assert 1e-5 < largest_error(Case(heads(), ((20, 300), (1, 300)), dtype=torch.bfloat16)) < 2e-2


MIXED = ((30, 290), (1, 520), (5, 5), (1, 130))


@pytest.mark.parametrize(
    "how", thin([{"cut": True}, {"kind": "small"}, {"kind": "large", "cut": True}], [{"kind": "small"}]), ids=str
)
def test_how_work_is_cut_changes_no_bit(how: dict[str, Any]) -> None:
    case = Case(heads(6, 2), MIXED)
    assert torch.equal(case.run(**how), case.run())


def test_a_chunk_has_the_bits_of_its_tokens_alone() -> None:
    case = Case(heads(), ((30, 290),))
    whole = case.run()
    for token in (0, 17, 29):
        one = Case(heads(), ((1, 261 + token),))
        one.slots, one.queries = case.slots, case.queries[token : token + 1]
        one.pages = Pages(case.pages.tables, one.pages.query_starts, one.pages.context_lens, 16)
        assert torch.equal(one.run()[0], whole[token])


@pytest.mark.parametrize("num_places", thin([1, 3, 64], [3]))
def test_every_item_of_a_hybrid_batch_is_computed_once_wherever_programs_land(num_places: int) -> None:
    case = Case(heads(), MIXED)
    assert torch.equal(case.run(binding="virtual", num_places=num_places, cut=True), case.run())


@pytest.mark.parametrize("kind", thin(["large", "small"], 1))
def test_prefill_and_decode_in_one_launch_equal_the_two_in_sequence(kind: str) -> None:
    case = Case(heads(), MIXED)
    assert torch.equal(case.run(binding="virtual"), case.run(kind=kind))
