"""Cuts the attention of a step into items for the kernels. Pure: arrays in, arrays out.

A tile is a run of rows of one sequence. A tile with few rows takes the kernel's small size, others the large one. Where there
are too few tiles to fill the device, the longest are cut at the splits of 256 keys, and every split is an item of its own;
that changes no bit (`triton.attention`), so only speed decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.backends.torch.schedule import SPLIT, AttentionShape

ITEM_FIELDS: Final = 5
"""Sequence, first row, first split, end of splits, row of the partial results or -1 (`triton.attention`)."""
JOIN_FIELDS: Final = 5
"""Sequence, first row, first partial row, partial rows from one split to the next, splits (`triton.join`)."""
JOIN_ROWS: Final = 16
UNUSED_ROW: Final = 2**30
"""First row of an item that does nothing."""
PROGRAMS_EACH: Final = 4
"""Programs that each multiprocessor should find work for, in a step that is cut."""

Items = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Items of one step for layers of one shape, the heaviest first.

    Attributes:
        large, small: [num_items, ITEM_FIELDS] int32.
        joins: [num_joins, JOIN_FIELDS] int32.
        num_partial_rows: rows of partial results that they need.
    """

    large: Items
    small: Items
    joins: Items
    num_partial_rows: int


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """The properties of kernel and device that decide how work is split.

    Attributes:
        large, small: rows of the two tile sizes.
        num_places: multiprocessors.
        max_partial_rows: room for partial results.
    """

    large: int
    small: int
    num_places: int
    max_partial_rows: int


@dataclass(frozen=True, slots=True)
class _Tile:
    seq: int
    start: int
    num_rows: int
    first_split: int
    end_split: int

    @property
    def num_splits(self) -> int:
        return self.end_split - self.first_split


def cut_work(query_starts: Items, context_lens: Items, shape: AttentionShape, limits: KernelLimits) -> KernelWork:
    """Returns the items of a step.

    Args:
        query_starts, context_lens: as in `backends.base.ForwardBatch`.
    """
    counts = np.diff(query_starts).tolist()
    tiles = [
        tile
        for seq, (count, context) in enumerate(zip(counts, context_lens.tolist(), strict=True))
        for tile in _cut_rows(seq, count, context, shape, limits)
    ]
    tiles.sort(key=lambda tile: tile.num_splits, reverse=True)
    cut, num_partial_rows = _choose_cut(tiles, shape, limits)
    items: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    joins: list[tuple[int, ...]] = []
    partial = 0
    for number, tile in enumerate(tiles):
        is_large = tile.num_rows > limits.small
        if number >= cut:
            items[is_large].append((tile.seq, tile.start, tile.first_split, tile.end_split, -1))
            continue
        items[is_large] += _apart(tile, partial)
        joins += _joins(tile, partial)
        partial += tile.num_splits * tile.num_rows
    return KernelWork(
        _table(items[True], ITEM_FIELDS), _table(items[False], ITEM_FIELDS), _table(joins, JOIN_FIELDS), num_partial_rows
    )


def pad_items(items: Items, num_items: int) -> Items:
    """Returns the items with unused ones behind them, for a launch of fixed size."""
    padded = np.tile(np.array([0, UNUSED_ROW, 0, 0, -1], np.int32), (num_items, 1))
    padded[: len(items)] = items
    return padded


def pad_joins(joins: Items, num_joins: int) -> Items:
    """Returns the joins with unused ones (of no splits) behind them."""
    padded = np.zeros((num_joins, JOIN_FIELDS), np.int32)
    padded[: len(joins)] = joins
    return padded


def _cut_rows(seq: int, num_queries: int, context: int, shape: AttentionShape, limits: KernelLimits) -> Iterator[_Tile]:
    num_rows, start = num_queries * shape.group, context - num_queries
    size = limits.small if num_rows <= limits.small else limits.large
    for row in range(0, num_rows, size):
        end = min(row + size, num_rows)
        lowest = 0 if shape.window is None else max(0, start + row // shape.group - shape.window + 1)
        last = start + (end - 1) // shape.group
        yield _Tile(seq, row, end - row, lowest // SPLIT, last // SPLIT + 1)


def _choose_cut(tiles: Sequence[_Tile], shape: AttentionShape, limits: KernelLimits) -> tuple[int, int]:
    """Returns how many of the tiles (the longest first) are cut, and the rows of partial results that they need.

    A tile is worth cutting when it alone would take longer than the device's share of all splits.
    """
    wanted = PROGRAMS_EACH * limits.num_places
    share = max(1, sum(tile.num_splits for tile in tiles) * shape.num_kv_heads // wanted)
    num_cut = num_rows = 0
    for tile in tiles:
        more = num_rows + tile.num_splits * tile.num_rows
        if tile.num_splits <= share or more > limits.max_partial_rows:
            break
        num_cut, num_rows = num_cut + 1, more
    return num_cut, num_rows


def _apart(tile: _Tile, partial: int) -> list[tuple[int, ...]]:
    return [
        (tile.seq, tile.start, split, split + 1, partial + number * tile.num_rows)
        for number, split in enumerate(range(tile.first_split, tile.end_split))
    ]


def _joins(tile: _Tile, partial: int) -> list[tuple[int, ...]]:
    return [
        (tile.seq, tile.start + row, partial + row, tile.num_rows, tile.num_splits)
        for row in range(0, tile.num_rows, JOIN_ROWS)
    ]


def _table(rows: list[tuple[int, ...]], num_fields: int) -> Items:
    return np.array(rows, np.int32).reshape(-1, num_fields)
