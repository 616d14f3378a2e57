"""Paged attention of prefill, decode and hybrid batches in one launch.

Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over splits of 256 keys at absolute positions. A split starts
from nothing and the splits are joined in order, whether one program loops over them or each is a program of its own whose
results `join.py` joins: the bits are the same, so the host may cut work as it likes.

A row is one (token, head of the group): the heads that share a KV head stand together, and their keys are read once (GQA).
Large tiles are for prefill, small ones for decode. In a hybrid batch both run in one launch, and which of them a program
takes is decided when it has landed on a multiprocessor, so that each of them computes and reads at once (POD-Attention,
Kamath et al. 2025, section 4.1: SM-aware CTA scheduling, in proportion to the work of either kind).

The sum of the weights is a product with ones: a tensor core adds in the same order whatever the tile, a reduction across
threads would not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid

from cloister.backends.torch.cuda.work import ITEM_FIELDS
from cloister.backends.torch.schedule import SPLIT
from cloister.backends.torch.triton import EXACT

KEYS: Final = 64
"""Keys that a program holds at once; splits are cut into tiles of so many."""
Binding = Literal["multiprocessor", "virtual", "interleaved"]
"""How a program of a hybrid launch finds its work: by a counter of its multiprocessor, by a counter of a made-up one (where
the hardware has no number for it), or by its own number."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of the tiles of prefill and of decode, and the warps of a program.

    Both take the same number of warps, because one launch holds both.
    """

    large: int
    small: int
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class Heads:
    """The properties of a layer that an attention kernel is compiled for. A window of 0 is none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Pages:
    """The sequences of a step on the device.

    Attributes:
        tables: [num_seqs, width] int32 block tables.
        query_starts: [num_seqs + 1] int32.
        context_lens: [num_seqs] int32.
    """

    tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for splits that are computed apart.

    Attributes:
        mixed: [num_rows, num_kv_heads, head_dim] float32, weighted values.
        stats: [num_rows, num_kv_heads, 2] float32, highest score and sum of weights.
    """

    mixed: Tensor
    stats: Tensor


@triton.jit
def join_states(highest, total, mixed, other_highest, other_total, other_mixed):
    """Joins two online softmax states; a state that saw nothing (-1e30, 0, 0) changes no bit of the other."""
    peak = tl.maximum(highest, other_highest)
    fade, other_fade = tl.exp2(highest - peak), tl.exp2(other_highest - peak)
    total = total * fade[:, None] + other_total * other_fade[:, None]
    mixed = mixed * fade[:, None] + other_mixed * other_fade[:, None]
    return peak, total, mixed


@triton.jit
def _attend_item(
    item, kv_head, queries, slots, tables, width, query_starts, context_lens, out, mixes, stats,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes the rows of one item against its splits, for one KV head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TILES: tl.constexpr = SPLIT // KEYS
    seq, row = tl.load(item), tl.load(item + 1)
    first_split, end_split, partial = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    begin = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - begin
    start = tl.load(context_lens + seq) - num_queries
    offsets = tl.arange(0, ROWS)
    rows = row + offsets
    inside = rows < num_queries * GROUP
    positions = start + rows // GROUP
    dims = tl.arange(0, DIMS)
    in_head = dims < HEAD_DIM
    places = ((begin + rows // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + rows % GROUP) * HEAD_DIM
    kept = inside[:, None] & in_head[None, :]
    query = tl.load(queries + places[:, None] + dims[None, :], mask=kept, other=0.0)

    last = start + (tl.minimum(row + ROWS, num_queries * GROUP) - 1) // GROUP
    first_tile, end_tile = first_split * TILES, tl.minimum(end_split * TILES, last // KEYS + 1)
    if WINDOW > 0:
        first_tile = tl.maximum(first_tile, tl.maximum(start + row // GROUP - WINDOW + 1, 0) // KEYS)

    ones = tl.full((KEYS, 16), 1.0, tl.float32).to(queries.dtype.element_ty)
    nothing = tl.full((ROWS,), -1e30, tl.float32)
    no_total = tl.zeros((ROWS, 16), tl.float32)
    no_mixed = tl.zeros((ROWS, DIMS), tl.float32)
    highest, total, mixed = nothing, no_total, no_mixed
    all_highest, all_total, all_mixed = nothing, no_total, no_mixed
    for tile in range(first_tile, end_tile):
        keys = tile * KEYS + tl.arange(0, KEYS)
        known = keys <= last
        blocks = tl.load(tables + seq.to(tl.int64) * width + keys // BLOCK_SIZE, mask=known, other=0)
        found = (blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        key = tl.load(slots + found[None, :] + dims[:, None], mask=known[None, :] & in_head[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee")
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        fade = tl.exp2(highest - peak)
        weights = tl.exp2(scores - peak[:, None]).to(queries.dtype.element_ty)
        behind = found + NUM_KV_HEADS * HEAD_DIM
        value = tl.load(slots + behind[:, None] + dims[None, :], mask=known[:, None] & in_head[None, :], other=0.0)
        total = tl.dot(weights, ones, total * fade[:, None], input_precision="ieee")
        mixed = tl.dot(weights, value, mixed * fade[:, None], input_precision="ieee")
        highest = peak
        if (tile + 1) % TILES == 0:
            all_highest, all_total, all_mixed = join_states(all_highest, all_total, all_mixed, highest, total, mixed)
            highest, total, mixed = nothing, no_total, no_mixed
    all_highest, all_total, all_mixed = join_states(all_highest, all_total, all_mixed, highest, total, mixed)

    whole = tl.max(all_total, 1)  # its columns are equal
    divisor = tl.where(whole > 0, whole, 1.0)  # rows past the last one saw nothing
    if partial < 0:
        tl.store(out + places[:, None] + dims[None, :], (all_mixed / divisor[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        targets = (partial + offsets).to(tl.int64) * NUM_KV_HEADS + kv_head
        tl.store(mixes + targets[:, None] * HEAD_DIM + dims[None, :], all_mixed, mask=kept)
        tl.store(stats + targets * 2, all_highest, mask=inside)
        tl.store(stats + targets * 2 + 1, whole, mask=inside)


@triton.jit
def _take_work(counters, num_large, num_small, NUM_PLACES: tl.constexpr, HARDWARE: tl.constexpr):
    """Returns (takes a large item, its number) for a program of a hybrid launch; every item is taken exactly once.

    A ticket of the multiprocessor says which kind is due there, so that kinds mix on each in proportion to their numbers.
    When that kind has run out, the program takes the other: there are as many programs as items.
    """
    place = (smid() if HARDWARE else tl.program_id(0)) % NUM_PLACES
    ticket = tl.atomic_add(counters + 2 + place, 1).to(tl.int64) % (num_large + num_small)
    is_large = ((ticket + 1) * num_large) // (num_large + num_small) > (ticket * num_large) // (num_large + num_small)
    number = tl.atomic_add(counters + tl.where(is_large, 0, 1), 1)
    if number >= tl.where(is_large, num_large, num_small):
        is_large = is_large == 0
        number = tl.atomic_add(counters + tl.where(is_large, 0, 1), 1)
    return is_large, number


@triton.jit
def _find_work(num_large, num_small):
    """As `_take_work`, from the program's number alone: kinds follow each other in proportion."""
    number = tl.program_id(0).to(tl.int64)
    num_before = (number * num_large) // (num_large + num_small)
    is_large = ((number + 1) * num_large) // (num_large + num_small) > num_before
    return is_large, tl.where(is_large, num_before, number - num_before).to(tl.int32)


@triton.jit(do_not_specialize=["num_large", "num_small", "width"])
def attend_kernel(
    queries, slots, tables, width, query_starts, context_lens, large_items, num_large, small_items, num_small,
    counters, out, mixes, stats,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, FIELDS: tl.constexpr,
    LARGE: tl.constexpr, SMALL: tl.constexpr, NUM_PLACES: tl.constexpr, BINDING: tl.constexpr,
):  # fmt: skip
    """One program computes one item for one KV head. LARGE or SMALL is 0 where the launch has no such items."""
    if LARGE == 0 or SMALL == 0:
        is_large, number = LARGE > 0, tl.program_id(0)
    elif BINDING == "interleaved":
        is_large, number = _find_work(num_large * NUM_KV_HEADS, num_small * NUM_KV_HEADS)
    else:
        is_large, number = _take_work(
            counters, num_large * NUM_KV_HEADS, num_small * NUM_KV_HEADS, NUM_PLACES, BINDING == "multiprocessor"
        )
    kv_head = number % NUM_KV_HEADS
    if LARGE > 0:
        if is_large:
            _attend_item(
                large_items + (number // NUM_KV_HEADS) * FIELDS, kv_head, queries, slots, tables, width, query_starts,
                context_lens, out, mixes, stats, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DIMS, WINDOW, BLOCK_SIZE, KEYS, SPLIT,
                LARGE,
            )  # fmt: skip
    if SMALL > 0:
        if not is_large:
            _attend_item(
                small_items + (number // NUM_KV_HEADS) * FIELDS, kv_head, queries, slots, tables, width, query_starts,
                context_lens, out, mixes, stats, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DIMS, WINDOW, BLOCK_SIZE, KEYS, SPLIT,
                SMALL,
            )  # fmt: skip


def attend(
    queries: Tensor,
    slots: Tensor,
    pages: Pages,
    large_items: Tensor,
    small_items: Tensor,
    out: Tensor,
    partials: Partials,
    *,
    heads: Heads,
    tiles: Tiles,
    counters: Tensor,
    binding: Binding,
) -> None:
    """Computes every item of a step.

    Args:
        queries: [num_tokens, num_heads, head_dim] of the cache's type, rotated and scaled so that 2 ** (q . k) is the weight.
        slots: [num_slots, 2 * num_kv_heads * head_dim], one layer of the cache, keys before values.
        large_items, small_items: [num_items, ITEM_FIELDS] int32.
        out: as `queries`; rows of items with partial results are left to `join.join_splits`.
        counters: [2 + multiprocessors] int32, zero.
    """
    num_large, num_small = len(large_items), len(small_items)
    if num_large + num_small == 0:
        return
    attend_kernel[((num_large + num_small) * heads.num_kv_heads,)](
        queries, slots, pages.tables, pages.tables.shape[1], pages.query_starts, pages.context_lens,
        large_items, num_large, small_items, num_small, counters, out, partials.mixed, partials.stats,
        NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, HEAD_DIM=heads.head_dim, DIMS=padded_dims(heads.head_dim),
        WINDOW=heads.window, BLOCK_SIZE=pages.block_size, KEYS=KEYS, SPLIT=SPLIT, FIELDS=ITEM_FIELDS,
        LARGE=tiles.large if num_large else 0, SMALL=tiles.small if num_small else 0,
        NUM_PLACES=counters.shape[0] - 2, BINDING=binding, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **EXACT,
    )  # fmt: skip


def padded_dims(head_dim: int) -> int:
    """Returns the width of a tile that holds a head: a power of two, 16 at least."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def make_partials(num_rows: int, heads: Heads, device: torch.device) -> Partials:
    """Returns room for the partial results of `num_rows` rows."""
    mixed = torch.empty(num_rows, heads.num_kv_heads, heads.head_dim, device=device)
    return Partials(mixed, torch.empty(num_rows, heads.num_kv_heads, 2, device=device))
