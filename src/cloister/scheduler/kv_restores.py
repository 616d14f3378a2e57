"""Decides which KV is restored from tiers (decisions/0029). Pure: no I/O, no clock; it takes `now`.

When a sequence is next, the tiers are asked whether they have more of its prefix than the device. If loading it, from all tiers
or only the faster ones, is predicted to take less time than computing it, the sequence leaves the queue until the load ends
(`scheduler.kv_loads`). If no other sequence has work, and that is faster still, the sequence starts and computes the front
while the end loads (`scheduler.two_sided_restores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from cloister.kv import NO_BLOCK, PrefixCache
from cloister.kv.tier_index import MAX_TRIAL_BYTES
from cloister.kv.tier_slots import TierBlock
from cloister.kv.tiers import KVTiers
from cloister.kv.two_sided import MAX_TIME_RATIO, TwoSidedRestore
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.request_table import RequestTable
from cloister.scheduler.sequence import RequestState, SequenceRecord
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.scheduler.two_sided_restores import TwoSidedRestores

TRIAL: Final = ""
"""In place of a request id: a read that only measures a tier. There is at most one at a time."""
MIN_READ_S: Final = 0.05
"""Minimum timeout of a read; else it is the time of computing its entries."""


class TierEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry to read.

    Attributes:
        blocks: of each group; None where none is needed.
    """

    entry: int
    key: bytes
    blocks: tuple[TierBlock | None, ...]


@dataclass(frozen=True, slots=True, repr=False)
class TierRead:
    """A read from tiers, for a request or to measure a tier.

    Attributes:
        request_id: the request that waits for it; `TRIAL` if none does.
        keys: prefix keys of the hit after the read.
        entries: entries of which the device lacks a block, in the order in which they are read.
        tier_bytes: bytes read from each tier.
        compute_s: predicted seconds of computing the entries.
        restore: set if the front is computed meanwhile; the last entry is then read first.
    """

    request_id: str
    keys: list[bytes]
    root: bytes
    entries: list[TierEntry]
    tier_bytes: list[int]
    compute_s: float
    restore: TwoSidedRestore | None = None

    @property
    def max_part_bytes(self) -> int | None:
        """Maximum bytes of one part; None: whatever is fastest."""
        return None if self.restore is None else self.restore.part_bytes

    @property
    def num_bytes(self) -> int:
        return sum(self.tier_bytes)

    @property
    def slowest(self) -> int:
        """Number of the last tier that it needs."""
        return max((tier for tier, num_bytes in enumerate(self.tier_bytes) if num_bytes), default=0)

    @property
    def owner(self) -> bytes:
        """Whose blocks they are (`TierBlock.owner`)."""
        return next(block.owner for entry in self.entries for block in entry.blocks if block is not None)

    @property
    def timeout_s(self) -> float:
        """Timeout of the read: computing would take as long."""
        return max(MIN_READ_S, self.compute_s)

    def __repr__(self) -> str:
        """Shows no key."""
        return f"TierRead(num_entries={len(self.entries)}, num_bytes={self.num_bytes})"


class KVRestores:
    """Decides what is read from tiers.

    Args:
        max_entries: longest prefix that the prefix cache keeps for one scope; None: no limit.

    Attributes:
        tiers: the tiers.
        reads: reads that have not begun (`take_reads`).
        is_trying: a trial has not ended; the engine resets it.
        two_sided: performs two-sided restores.
    """

    def __init__(
        self,
        tiers: KVTiers,
        requests: RequestTable,
        cache: PrefixCache,
        loads: KVLoads,
        cost: StepCost,
        max_entries: int | None,
    ) -> None:
        self.tiers = tiers
        self.reads: list[TierRead] = []
        self.is_trying = False
        self._cache, self._loads, self._cost = cache, loads, cost
        self._block_size, self._max_entries = requests.pool.block_size, max_entries
        self.two_sided = TwoSidedRestores(tiers, requests, loads, self._predict_s)

    def choose_read(self, sequence: SequenceRecord, keys: Sequence[bytes]) -> TierRead | None:
        """Returns the read for the next sequence; None if it should start with the device's blocks.

        Args:
            keys: prefix keys that it may read.
        """
        state = sequence.request_state
        if not sequence.may_restore or self.tiers.is_empty or len(state.sequences) > 1:
            return None
        keys = keys[: self._max_entries]
        num_here = self._cache.match_length(keys)
        reads = self._list_reads(state, keys, num_here)
        if not reads:
            return None
        num_entries = len(reads[-1].keys)
        overhead_s = self._loads.predict_overhead_s()
        taken_s = [
            overhead_s + self.tiers.predict_s(read.tier_bytes) + self._predict_s(len(read.keys), num_entries) for read in reads
        ]
        best_s = min(taken_s)
        best = reads[taken_s.index(best_s)] if best_s < reads[-1].compute_s else None
        if self.two_sided.fits(sequence):
            both = self._plan_two_sided(reads[-1], min(best_s, reads[-1].compute_s))
            if both is not None:
                return both
        if best is not reads[-1]:
            self._decline(reads[-1])
        if best is None:
            sequence.may_restore = False
            self._loads.note_declined()
        return best

    def _list_reads(self, state: RequestState, keys: Sequence[bytes], num_here: int) -> list[TierRead]:
        """Returns the reads from the first tier, the first two, and so on, each if it restores more."""
        reads: list[TierRead] = []
        num_before = num_here
        for num_tiers in range(1, len(self.tiers.indexes) + 1):
            num_entries = self._cache.match_length(keys, self.tiers, num_tiers)
            if num_entries > num_before:
                entries = self._list_missing(keys[:num_entries])
                compute_s = self._predict_s(num_here, num_entries)
                name, tier_bytes = state.request.request_id, self._count_bytes(entries)
                reads.append(TierRead(name, list(keys[:num_entries]), state.root, entries, tier_bytes, compute_s))
                num_before = num_entries
        return reads

    def _plan_two_sided(self, read: TierRead, alone_s: float) -> TierRead | None:
        """Returns a read of the same entries in reverse, while the first ones are computed; None if that is not clearly faster
        than `alone_s`, the time of the better of loading and computing alone."""
        sizes = self.tiers.indexes[0].layout.block_bytes
        blocks = [(block.tier, sizes[block.group]) for entry in read.entries for block in entry.blocks if block is not None]
        byte_s = [index.predict_s(1) for index in self.tiers.indexes]
        restore = TwoSidedRestore(read.entries[0].entry, blocks, byte_s, read.owner)
        step_s = self._cost.predict(StepSize())  # another one than loading or computing alone would need
        taken_s = restore.predict_s(self._predict_s) + step_s + self._loads.predict_overhead_s()
        return replace(read, entries=read.entries[::-1], restore=restore) if taken_s <= MAX_TIME_RATIO * alone_s else None

    def _predict_s(self, start: int, end: int) -> float:
        """Returns the predicted seconds of computing entries [start, end)."""
        if start == end:
            return 0.0
        return self._cost.predict(StepSize().plus(start * self._block_size, (end - start) * self._block_size))

    def begin(self, sequence: SequenceRecord, read: TierRead, now: float) -> None:
        """Begins a read for a sequence that has left the queue: it waits, or computes the front."""
        sequence.may_restore = False
        found = [block for part in read.entries for block in part.blocks if block is not None]
        # so that the end of a prefix goes before its beginning
        self.tiers.touch(found if read.restore is not None else reversed(found))
        if read.restore is not None:
            self._loads.begin_two_sided(sequence, read.keys, read.restore, self._name(read), 2 * read.timeout_s, now)
        else:
            num_promised = [sum(block.group == group for block in found) for group in range(self.tiers.num_groups)]
            self._loads.begin_restore(sequence, read.keys, self._name(read), num_promised, 2 * read.timeout_s, now)
        self.reads.append(read)

    def take_reads(self) -> list[TierRead]:
        """Removes and returns the reads to begin: the last one of each request, if its load has not ended meanwhile."""
        reads, self.reads = {read.request_id: read for read in self.reads}, []
        return [read for name, read in reads.items() if name == TRIAL or self._loads.is_loading(name)]

    def is_overtaken(self, read: TierRead, num_arrived: int, measured: Sequence[tuple[int, float]]) -> bool:
        """Whether computing the entries that have not arrived is now predicted to be faster than waiting for them.

        Only if all layers see all positions: else a prefix hit cannot end at any entry. False once all entries have arrived.

        Args:
            num_arrived: number of leading entries that have arrived.
            measured: (bytes, seconds) of each tier so far.
        """
        if self.tiers.num_groups > 1 or not self._cache.is_tree or read.request_id == TRIAL or read.restore is not None:
            return False
        if num_arrived in (0, len(read.entries)):
            return False
        left_s = 0.0
        for index, num_bytes, (arrived, elapsed_s) in zip(self.tiers.indexes, read.tier_bytes, measured, strict=True):
            left_s += (num_bytes - arrived) * elapsed_s / arrived if arrived else index.predict_s(num_bytes)
        return left_s > self._predict_s(read.entries[num_arrived].entry, len(read.keys))

    def _name(self, read: TierRead) -> str:
        """Returns the names of the tiers that a read needs."""
        return "+".join(index.name for index, num in zip(self.tiers.indexes, read.tier_bytes, strict=True) if num)

    def _decline(self, read: TierRead) -> None:
        """Notes that the slowest tier of a read was slower than computing. Every so often reads a part of it as a trial, while
        the request is computed."""
        slowest = read.slowest
        if not self.tiers.indexes[slowest].decline() or self.is_trying:
            return
        part: list[TierEntry] = []
        for entry in read.entries:
            blocks = tuple(block if block is not None and block.tier == slowest else None for block in entry.blocks)
            if part and sum(self._count_bytes([*part, TierEntry(entry.entry, entry.key, blocks)])) > MAX_TRIAL_BYTES:
                break
            if any(blocks):
                part.append(TierEntry(entry.entry, entry.key, blocks))
        self.is_trying = True
        self.reads.append(TierRead(TRIAL, [], read.root, part, self._count_bytes(part), read.compute_s))

    def _count_bytes(self, entries: Sequence[TierEntry]) -> list[int]:
        """Returns the bytes of entries by tier."""
        return self.tiers.count_bytes(block for entry in entries for block in entry.blocks if block is not None)

    def _list_missing(self, keys: Sequence[bytes]) -> list[TierEntry]:
        """Returns the entries of which a hit of all keys needs a block that the device lacks."""
        firsts = self._cache.first_entries(len(keys))
        missing = []
        for entry in range(min(firsts), len(keys)):
            blocks = tuple(
                self.tiers.find(keys[entry], group) if block == NO_BLOCK and entry >= first else None
                for group, (block, first) in enumerate(zip(self._cache.blocks_of(keys[entry]), firsts, strict=True))
            )
            if any(blocks):
                missing.append(TierEntry(entry, keys[entry], blocks))
        return missing
