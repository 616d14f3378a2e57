"""Which query rows attend to which keys, in which order: made once a step, used by every layer of the same shape.

A unit is a run of query rows of one sequence; a row is one (token, head of the group), so the heads that share a KV head
stand together (GQA). Units of equal padded size are computed as a batch, split by split: split s holds the keys at the
absolute positions [256 s, 256 (s + 1)). A row therefore meets the same keys in the same order and the same shapes,
whatever chunk, block size or company it came in (batch invariance). No L x L buffer is ever made (Dao et al. 2022).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cloister.backends.base import ForwardBatch, KVLayout
from cloister.backends.torch.trees import TreeNode, token_places

SPLIT = 256
_SCORES_BYTES = 1 << 20  # scores of one batch: what stays in a core's own cache
_ROWS_TO_SHARE = 256  # fewer rows of one sequence are quicker in one unit: every unit fetches the keys anew
_SPLITS_AT_ONCE = 16  # splits of all units of a run together: each is 256 keys and values to fetch

Int64Array = npt.NDArray[np.int64]
Positions = TypeVar("Positions", int, npt.NDArray[np.int32])


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties of an attention layer that decide the order of work."""

    num_heads: int
    num_kv_heads: int
    window: int | None
    chunked: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def first_seen(self, positions: Positions) -> Positions:
        """Returns the first position that a query at each position sees; it may be negative."""
        if self.window is None:
            return positions * 0
        return positions // self.window * self.window if self.chunked else positions - self.window + 1


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive splits of 256 keys, or of the first `width` of them, for the first `num_units` units of a batch.

    Their products are computed at once, and joined one after the other.

    Attributes:
        first_split: number of the first of them.
        width: keys of each split that are computed; the rest would be hidden from every row.
        page_size: slots that are fetched at once; in a run that sees every key whole blocks, which is much quicker.
        pages: [num_splits * num_units * width / page_size] pages of the cache; single slots past a context are the zero slot.
        hidden: [num_units, num_rows, width], True where a row must not see a key; None when every row sees every key,
            which is so in every run of several splits.
        first_slot: where keys lie in a row, of a run that sees every key of one sequence: they are read where they are. None:
            `pages` are fetched.
    """

    first_split: int
    num_splits: int
    num_units: int
    width: int
    page_size: int
    pages: Tensor
    hidden: Tensor | None
    first_slot: int | None = None


@dataclass(frozen=True, slots=True)
class UnitDocuments:
    """The documents that each unit weighs (`ForwardBatch.document_ranges`), [num_units] each.

    Attributes:
        power: scale times temperature.
    """

    first: Tensor
    end: Tensor
    inverse_temperature: Tensor
    power: Tensor


@dataclass(frozen=True, slots=True)
class UnitBatch:
    """Units that are computed together.

    Attributes:
        sources: [num_kv_heads * num_units * num_rows] rows of the queries [num_tokens * num_heads, head_dim].
        targets: the same for the outputs; padding goes to the row after the last.
        documents: what every unit weighs; None where no unit weighs any.
    """

    num_units: int
    num_rows: int
    sources: Tensor
    targets: Tensor
    runs: tuple[Run, ...]
    documents: UnitDocuments | None = None

    @property
    def num_pairs(self) -> int:
        """Pairs of a query row and a key, of one KV head."""
        return self.num_rows * sum(run.num_splits * run.num_units * run.width for run in self.runs)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows [start, end) of a sequence, counted from its first query, that see keys at positions from `first` to `last`."""

    seq: int
    start: int
    end: int
    first: int
    last: int


class KeySlots:
    """Cache slots of every context of a step, split by split.

    Args:
        batch: its block tables are of one group of layers.
        zero_slot: stands for positions past the context, and behind the window.
        window: of the group, where blocks behind it are given back.
        in_rows: whether sequences may lie at consecutive slots (`KVLayout.ranges`), and are then read in place.

    Attributes:
        starts: [num_seqs] index of a sequence's first split in `slots`.
        slots: [num_splits of all sequences, 256].
    """

    def __init__(
        self,
        batch: ForwardBatch,
        block_size: int,
        zero_slot: int,
        nodes: Sequence[TreeNode] = (),
        window: int | None = None,
        *,
        in_rows: bool = False,
    ) -> None:
        self.block_size, self.in_rows = block_size, in_rows
        counts = -(-batch.context_lens.astype(np.int64) // SPLIT)
        self.starts = np.cumsum(counts) - counts
        seqs = np.repeat(np.arange(len(counts)), counts)
        positions = ((np.arange(counts.sum()) - self.starts[seqs]) * SPLIT)[:, None] + np.arange(SPLIT)
        past = positions >= batch.context_lens[seqs, None]
        places = np.where(past, 0, positions // block_size)
        if window is not None:  # what lies behind it may be another's by now
            first_queries = batch.context_lens - np.diff(batch.query_starts)
            past |= positions <= first_queries[seqs, None] - window
        blocks = batch.block_tables[seqs[:, None], places].astype(np.int64)
        self.slots: Int64Array = np.where(past, zero_slot, blocks * block_size + positions % block_size)
        for node in nodes:
            for position, place in enumerate(node.places, node.first_position):
                slot = int(batch.block_tables[node.seq, place // block_size]) * block_size + place % block_size
                self.slots[self.starts[node.seq] + position // SPLIT, position % SPLIT] = slot


def of_group(batch: ForwardBatch, layout: KVLayout, group: int) -> ForwardBatch:
    """Returns a batch with the block tables of a group of layers, and blocks numbered from 0."""
    if len(layout.groups) < 2:
        return batch
    first = layout.blocks_of_group(group).start
    return replace(batch, block_tables=batch.block_tables[:, group :: len(layout.groups)] - first)


def token_slots(batch: ForwardBatch, block_size: int) -> Int64Array:
    """Returns the cache slot of each token of a step, [num_tokens]."""
    seqs = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    places = token_places(batch)
    blocks = batch.block_tables[seqs, places // block_size].astype(np.int64)
    return blocks * block_size + places % block_size


def schedule_units(
    batch: ForwardBatch,
    keys: KeySlots,
    shape: AttentionShape,
    tiles: Sequence[int],
    widths: Sequence[int],
    num_threads: int,
    num_padded: int,
    device: torch.device,
) -> list[UnitBatch]:
    """Returns the batches of a step for layers of one shape.

    Args:
        tiles, widths: rows that a unit and keys that a split may have, ascending (`attention.attention_tiles`).
        num_padded: tokens including padding; the row after theirs takes the output of padding.
    """
    rows_at_once = max(tiles[0], _SCORES_BYTES // (4 * SPLIT * shape.num_kv_heads))
    largest = max(size for size in tiles if size <= max(rows_at_once, tiles[0]))
    by_size: dict[tuple[int, bool], list[_Unit]] = {}
    for unit in _cut_units(batch, shape, tiles, largest, num_threads):
        size = next(size for size in tiles if size >= unit.end - unit.start)
        weighs = batch.document_ranges is not None and bool(np.diff(batch.document_ranges[unit.seq]))
        by_size.setdefault((size, weighs), []).append(unit)
    batches = []
    for (size, weighs), units in by_size.items():
        units.sort(key=lambda unit: unit.last, reverse=True)
        num_alone = sum(keys.in_rows and unit.last >= SPLIT for unit in units)  # keys in a row are those of one sequence
        at_once = min(max(1, rows_at_once // size), -(-len(units) // num_threads))
        starts = [*range(num_alone), *range(num_alone, len(units), at_once), len(units)]
        for start, end in itertools.pairwise(starts):
            chosen = units[start:end]
            made = _make_batch(batch, keys, shape, widths, chosen, size, num_padded, device)
            batches.append(replace(made, documents=_find_documents(batch, chosen, device)) if weighs else made)
    return batches


def _cut_units(
    batch: ForwardBatch, shape: AttentionShape, tiles: Sequence[int], largest: int, num_threads: int
) -> Iterator[_Unit]:
    """Cuts the rows of each sequence into units; many rows into one for each thread at least."""
    last_seen = batch.positions if batch.last_seen is None else batch.last_seen
    for seq, (begin, end) in enumerate(zip(batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist(), strict=True)):
        if begin == end:
            continue
        position = int(batch.positions[begin])
        num_rows = (end - begin) * shape.group
        share = -(-num_rows // num_threads)
        at_once = largest
        if num_rows >= _ROWS_TO_SHARE:
            at_once = min(largest, next((size for size in tiles if size >= share), largest))
        for start in range(0, num_rows, at_once):
            stop = min(start + at_once, num_rows)
            tokens = slice(begin + start // shape.group, begin + (stop - 1) // shape.group + 1)
            first = max(0, shape.first_seen(position + start // shape.group))
            yield _Unit(seq, start, stop, first, int(last_seen[tokens].max()))


def _find_documents(batch: ForwardBatch, units: Sequence[_Unit], device: torch.device) -> UnitDocuments:
    assert batch.document_ranges is not None
    assert batch.document_weights is not None
    seqs = [unit.seq for unit in units]
    first, end = torch.from_numpy(batch.document_ranges[seqs]).to(device).unbind(1)
    temperature, scale = torch.from_numpy(batch.document_weights[seqs]).to(device).unbind(1)
    return UnitDocuments(first, end, 1.0 / temperature, scale * temperature)


def _make_batch(
    batch: ForwardBatch,
    keys: KeySlots,
    shape: AttentionShape,
    widths: Sequence[int],
    units: Sequence[_Unit],
    size: int,
    num_padded: int,
    device: torch.device,
) -> UnitBatch:
    seqs = np.array([unit.seq for unit in units])
    starts = np.array([unit.start for unit in units])
    counts = np.array([unit.end - unit.start for unit in units])
    padding = np.arange(size) >= counts[:, None]
    rows = np.where(padding, starts[:, None], starts[:, None] + np.arange(size))
    tokens = batch.query_starts[seqs].astype(np.int64)[:, None] + rows // shape.group
    heads = np.arange(shape.num_kv_heads)[:, None, None] * shape.group + rows % shape.group
    sources = tokens * shape.num_heads + heads
    targets = np.where(padding, num_padded * shape.num_heads, sources)
    positions = batch.positions[tokens]
    last_seen = positions if batch.last_seen is None else batch.last_seen[tokens]
    return UnitBatch(
        num_units=len(units),
        num_rows=size,
        sources=torch.from_numpy(sources.reshape(-1)).to(device),
        targets=torch.from_numpy(targets.reshape(-1)).to(device),
        runs=tuple(_make_runs(keys, shape, widths, units, seqs, positions, last_seen, device)),
    )


def _make_runs(
    keys: KeySlots,
    shape: AttentionShape,
    widths: Sequence[int],
    units: Sequence[_Unit],
    seqs: Int64Array,
    positions: npt.NDArray[np.int32],
    last_seen: npt.NDArray[np.int32],
    device: torch.device,
) -> Iterator[Run]:
    """Yields the splits in order; units are sorted by their last key, so those still at work stand in front.

    A unit whose window begins later than the batch's first split meets splits that are hidden from it: they change no bit.
    """
    number, end = min(unit.first for unit in units) // SPLIT, units[0].last // SPLIT + 1
    while number < end:
        active = sum(unit.last >= number * SPLIT for unit in units)
        open_splits = _count_open(number, positions[:active], shape, max(1, _SPLITS_AT_ONCE // active))
        count, hidden, width = open_splits, None, SPLIT
        if not open_splits:
            begin = number * SPLIT
            width = next(width for width in widths if width >= min(units[0].last + 1 - begin, SPLIT))
            mask = _hidden(begin, begin + width, positions[:active], last_seen[:active], shape)
            count, hidden = 1, torch.from_numpy(mask).to(device)
        numbers = number + np.arange(count)
        slots = keys.slots[keys.starts[seqs[:active]] + numbers[:, None], :width].reshape(-1)
        if keys.in_rows and active == 1 and hidden is None and (np.diff(slots) == 1).all():
            yield Run(number, count, active, width, 1, torch.empty(0, dtype=torch.long), None, int(slots[0]))
            number += count
            continue
        page_size = keys.block_size if hidden is None and SPLIT % keys.block_size == 0 and not keys.in_rows else 1
        pages = torch.from_numpy(slots[::page_size] // page_size).to(device)
        yield Run(number, count, active, width, page_size, pages, hidden)
        number += count


def _count_open(number: int, positions: npt.NDArray[np.int32], shape: AttentionShape, most: int) -> int:
    """Returns how many whole splits from `number` on every row sees every key of, `most` at most."""
    if shape.first_seen(int(positions.max())) > number * SPLIT:
        return 0
    return min(most, max(0, (int(positions.min()) + 1) // SPLIT - number))


def _hidden(
    begin: int, end: int, positions: npt.NDArray[np.int32], last_seen: npt.NDArray[np.int32], shape: AttentionShape
) -> npt.NDArray[np.bool_]:
    """[num_units, num_rows, end - begin]: where a row must not see a key."""
    places = np.arange(begin, end)
    hidden: npt.NDArray[np.bool_] = places > last_seen[..., None]
    if shape.window is not None:
        hidden |= places < shape.first_seen(positions)[..., None]
    return hidden


# Threads for arithmetic. Torch's own are not used: they cut a product differently for each number of threads.
#
# Work is cut into tasks of fixed shape, each computed by one thread; who computes which task changes no bit.


Task = Callable[[], object]
WORTH_SHARING = 1.5e8
"""Operations below which two Python threads cost each other more (the interpreter's lock changes hands at every torch call)
than the second one saves; measured on two cores, where 3e7 made a step of 8 decodes take 13.8 ms instead of 7.3."""


class Team:
    """The calling thread and `num_threads - 1` helpers, which take tasks from one queue."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._helpers = ThreadPoolExecutor(num_threads - 1, "arithmetic", use_one_thread_per_operation)

    def run(self, tasks: Sequence[Task], num_operations: float) -> None:
        """Runs every task and returns when all are done. A helper that is late to wake finds nothing left to do.

        Args:
            num_operations: of all tasks together; few of them are not worth sharing.
        """
        if self._helpers is None or len(tasks) < 2 or num_operations < WORTH_SHARING:
            for task in tasks:
                task()
            return
        queue = deque(tasks)
        count = min(self.num_threads, len(tasks)) - 1
        futures = [self._helpers.submit(_drain, queue) for _ in range(count)]
        try:
            _drain(queue)
        finally:
            queue.clear()
            started = [future for future in futures if not future.cancel()]
            wait(started)
        for future in started:
            future.result()


def use_one_thread_per_operation() -> None:
    """Keeps torch and its libraries from splitting an operation; a tenth of a microsecond when nothing changes.

    OpenMP keeps the setting thread by thread, so every thread that computes must ask for it.
    """
    torch.set_num_threads(1)


def _drain(queue: deque[Task]) -> None:
    while True:
        try:
            task = queue.popleft()
        except IndexError:
            return
        task()
