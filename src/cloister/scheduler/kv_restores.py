"""KV that comes back from a tier (decisions/0029). Pure: no I/O, no clock; it takes `now`.

When a sequence is next, the tier is asked whether it has more of its prefix than the device. If loading that is predicted to
take less time than computing it, the sequence leaves the queue until it is loaded (`scheduler.kv_loads`), and others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cloister.kv import NO_BLOCK, PrefixCache
from cloister.kv.tiers import MAX_TRIAL_BYTES, KVTierIndex, TierBlock
from cloister.scheduler.budget import StepCost, StepSize
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.sequence import SequenceRecord

TRIAL: Final = ""
"""Stands for the id of a request in a read that only measures; there is one at a time."""
MIN_READ_S: Final = 0.05
"""A read has at least this time, and else that of computing what it brings."""


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One entry to read.

    Attributes:
        blocks: of each group; None where none is needed.
    """

    entry: int
    key: bytes
    blocks: tuple[TierBlock | None, ...]


@dataclass(frozen=True, slots=True, repr=False)
class TierRead:
    """What is to be read for one request, or for none, to measure the tier.

    Attributes:
        request_id: the request that waits for it; `TRIAL` if nobody does.
        keys: prefix keys up to where its hit can end then.
        entries: those that the device lacks something of.
        compute_s: what computing them is predicted to take.
    """

    request_id: str
    keys: list[bytes]
    root: bytes
    entries: list[TierEntry]
    num_bytes: int
    compute_s: float

    @property
    def owner(self) -> bytes:
        """Whose blocks they are (`TierBlock.owner`)."""
        return next(block.owner for entry in self.entries for block in entry.blocks if block is not None)

    @property
    def timeout_s(self) -> float:
        """Time for reading: by then computing would have been done."""
        return max(MIN_READ_S, self.compute_s)

    def __repr__(self) -> str:
        """Shows no key."""
        return f"TierRead(num_entries={len(self.entries)}, num_bytes={self.num_bytes})"


class KVRestores:
    """Decides what is read from a tier.

    Args:
        most_entries: longest prefix that the prefix cache keeps for one scope; None: no limit.

    Attributes:
        index: what the tier holds.
        reads: those that the engine must begin, since it last took them.
        is_trying: a trial has not ended; the engine says when.
    """

    def __init__(
        self, index: KVTierIndex, cache: PrefixCache, loads: KVLoads, cost: StepCost, block_size: int, most_entries: int | None
    ) -> None:
        self.index = index
        self.reads: list[TierRead] = []
        self.is_trying = False
        self._cache, self._loads, self._cost = cache, loads, cost
        self._block_size, self._most_entries = block_size, most_entries

    def find(self, sequence: SequenceRecord, keys: Sequence[bytes]) -> TierRead | None:
        """Returns what to read for a sequence that is next; None if it shall start with what the device has.

        Args:
            keys: those that it may read.
        """
        index, state = self.index, sequence.request_state
        if not sequence.may_restore or index.is_stuck or not len(index) or len(state.sequences) > 1:
            return None
        keys = keys[: self._most_entries]
        num_here = self._cache.match_length(keys)
        num_entries = self._cache.match_length(keys, index)
        if num_entries <= num_here:
            return None
        entries = self._list_missing(keys[:num_entries])
        num_bytes = sum(map(self._count_bytes, entries))
        num_positions = (num_entries - num_here) * self._block_size
        compute_s = self._cost.predict(StepSize().plus(num_here * self._block_size, num_positions))
        if not index.is_worth(num_bytes, compute_s):
            sequence.may_restore = False
            if index.decline() and not self.is_trying:
                self._try(state.root, entries, compute_s)
            return None
        return TierRead(state.request.request_id, list(keys[:num_entries]), state.root, entries, num_bytes, compute_s)

    def begin(self, sequence: SequenceRecord, read: TierRead, now: float) -> None:
        """Begins a read for a sequence that is not queued any more."""
        sequence.may_restore = False
        found = [block for part in read.entries for block in part.blocks if block is not None]
        self.index.touch(reversed(found))  # so that the end of a prefix goes before its beginning
        num_promised = [sum(block.group == group for block in found) for group in range(len(self.index.layout.num_slots))]
        self._loads.restore(sequence, read.keys, self.index.name, num_promised, 2 * read.timeout_s, now)
        self.reads.append(read)

    def _try(self, root: bytes, entries: Sequence[TierEntry], compute_s: float) -> None:
        """Has the beginning of a load measured while its request is computed."""
        num_bytes, part = 0, list[TierEntry]()
        for entry in entries:
            if part and num_bytes + self._count_bytes(entry) > MAX_TRIAL_BYTES:
                break
            part.append(entry)
            num_bytes += self._count_bytes(entry)
        self.is_trying = True
        self.reads.append(TierRead(TRIAL, [], root, part, num_bytes, compute_s))

    def _count_bytes(self, entry: TierEntry) -> int:
        return sum(self.index.layout.block_bytes[block.group] for block in entry.blocks if block is not None)

    def _list_missing(self, keys: Sequence[bytes]) -> list[TierEntry]:
        """Returns the entries of which a hit of all keys needs a block that the device lacks."""
        firsts = self._cache.first_entries(len(keys))
        missing = []
        for entry in range(min(firsts), len(keys)):
            blocks = tuple(
                self.index.find(keys[entry], group) if block == NO_BLOCK and entry >= first else None
                for group, (block, first) in enumerate(zip(self._cache.blocks_of(keys[entry]), firsts, strict=True))
            )
            if any(blocks):
                missing.append(TierEntry(entry, keys[entry], blocks))
        return missing
