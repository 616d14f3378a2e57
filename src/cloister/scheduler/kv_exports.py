"""Exports KV to other engines (decisions/0022). Pure: no I/O, no clock; it takes `now`.

The blocks that a query finds are leased until all were copied, so that none is evicted or overwritten meanwhile. A query may
follow a prompt that is being computed here (decisions/0037): entries are then found as steps complete them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from cloister.kv import NO_BLOCK, KVQuery
from cloister.scheduler.kv_load import FOLLOW_TIMEOUT_S, KV_LOAD_TIMEOUT_S
from cloister.scheduler.request_table import RequestTable

MAX_EXPORTS: Final = 8
"""Maximum number of concurrent exports; a further query finds nothing."""
PART_SHARE: Final = 4
"""Each step of a followed prompt leaves one part in this many of the rest to later steps."""
LAST_TOKENS: Final = 64
"""Maximum tokens of the last step of a longer followed prompt."""


@dataclass(frozen=True, slots=True)
class KVEntry:
    """One entry to copy.

    Attributes:
        blocks: of each group; `NO_BLOCK` where none is sent.
    """

    entry: int
    key: bytes
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Export:
    """One export.

    Attributes:
        entries: leased entries that were not taken yet.
        num_found: number of leading entries found so far.
        follows: more may be found.
        is_lost: its lease ended too early.
    """

    query: KVQuery
    follows: bool
    entries: list[KVEntry] = field(default_factory=list)
    num_found: int = 0
    is_lost: bool = False


class KVExports:
    """All exports of one engine, by number.

    Args:
        requests: the scheduler's requests.

    Attributes:
        of_requests_only: a query gets only KV of its own request, and only if this engine has that request or holds its KV for
            the engine that continues it; other cached KV is not exported.
    """

    def __init__(self, requests: RequestTable) -> None:
        self.of_requests_only = False
        self._requests = requests
        self._leases = requests.leases
        self._num_groups = requests.pool.num_groups
        self._windows = [group.window for group in requests.pool.groups]
        self._exports: dict[int, _Export] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """Exports that have not ended."""
        return len(self._exports)

    def open(self, query: KVQuery, now: float) -> int:
        """Looks up and leases the entries of a query. Returns the number of the export."""
        number = next(self._numbers)
        has_room = self._leases is not None and len(self._exports) < MAX_EXPORTS
        export = self._exports[number] = _Export(query, follows=query.follows and has_room)
        if export.follows:
            self.extend(number, now)
        elif has_room:
            self._find(number, export, now)
        return number

    def extend(self, number: int, now: float) -> None:
        """Looks up the entries that steps have added to a followed prompt."""
        export = self._exports[number]
        if not export.follows:
            return
        if export.num_found and not self.is_leased(number):
            export.follows, export.is_lost = False, True
            return
        num_done = self._count_done(export.query)
        export.follows = num_done is not None
        # a state is kept behind the whole prompt only, and without one nothing is found
        has_news = num_done is None or (num_done > export.num_found and self._requests.pool.state_group is None)
        if has_news:
            self._find(number, export, now)

    def take(self, number: int, num_entries: int | None = None) -> list[KVEntry] | None:
        """Returns the next `num_entries` entries of an export, or all; an empty list if there are no new ones. None if its
        lease ended before all were taken."""
        export = self._exports.get(number)
        if export is None or export.is_lost or (export.entries and not self.is_leased(number)):
            return None
        end = len(export.entries) if num_entries is None else num_entries
        taken, export.entries = export.entries[:end], export.entries[end:]
        return taken

    def is_leased(self, number: int) -> bool:
        """Whether the blocks of an export are still unchanged since they were taken. May be called from any thread."""
        return self._leases is not None and _name(number) in self._leases

    def root_of(self, number: int) -> bytes:
        """Returns the root of an export's chain."""
        return self._exports[number].query.root

    def is_done(self, number: int) -> bool:
        """Whether every entry was taken, and no further one will be found."""
        export = self._exports[number]
        return not (export.entries or export.follows)

    def close(self, number: int, *, is_complete: bool) -> None:
        """Ends an export, and with it its lease.

        Args:
            is_complete: the other engine has everything, so that the hold on the request's KV ends too.
        """
        export = self._exports.pop(number, None)
        if export is not None and self._leases is not None:
            self._leases.drop(_name(number))
            if is_complete:
                self._leases.drop(export.query.request_id)

    def _count_done(self, query: KVQuery) -> int | None:
        """Returns how many entries of a prompt are computed so far; None if there will be no more. An unknown request may be on
        its way here, unless it was here before."""
        state = self._requests.request_states.get(query.request_id)
        if state is None:
            return None if query.request_id in self._requests.left else 0
        sequence = state.sequences[0] if state.sequences else None
        if sequence is None or sequence.num_output > 0:
            return None
        return sequence.num_kept

    def _count_own(self, query: KVQuery, start: int) -> int:
        """Returns how many leading keys of a query belong to its request, which is here or was handed over from here. So no
        request id gives access to KV of another request.

        Args:
            start: number of leading keys counted before.
        """
        state = self._requests.request_states.get(query.request_id)
        sequences = [] if state is None else state.sequences
        held = [] if self._leases is None else self._leases.chains_of(query.request_id)
        chains = [*map(self._requests.prefixes.match_keys, sequences), *held]
        return max((_count_same(query.keys, chain, start) for chain in chains), default=0)

    def _find(self, number: int, export: _Export, now: float) -> None:
        """Leases further entries of an export."""
        assert self._leases is not None
        query, start = export.query, export.num_found
        keys = query.keys[: self._count_own(query, start)] if self.of_requests_only else query.keys
        if len(keys) <= start:
            return
        until_s = now + (FOLLOW_TIMEOUT_S if query.follows else KV_LOAD_TIMEOUT_S)
        table = self._leases.take(_name(number), keys, until_s, start=start)
        export.num_found = start + len(table) // self._num_groups
        for entry in range(start, export.num_found):
            at = (entry - start) * self._num_groups
            blocks = tuple(
                NO_BLOCK if window is None and entry < query.num_known else block
                for block, window in zip(table[at : at + self._num_groups], self._windows, strict=True)
            )
            if any(block != NO_BLOCK for block in blocks):
                export.entries.append(KVEntry(entry, query.keys[entry], blocks))


def limit_followed_chunk(start: int, num_left: int, block_size: int) -> int:
    """Returns the maximum number of positions of a followed prompt's next step, so that another engine loads KV while the rest
    is computed (decisions/0037).

    Each step leaves a quarter of the rest, down to a small last step: the KV of a step moves in less time than a quarter of it
    takes to compute, so little is left to move after the last one.

    Args:
        start: first position of the rest.
    """
    if num_left <= max(LAST_TOKENS, block_size):
        return num_left
    last = (start + num_left - 1) // block_size * block_size
    end = -(-(start + num_left - num_left // PART_SHARE) // block_size) * block_size
    return max(min(end, last) - start, 1)


def _count_same(asked: Sequence[bytes], own: Sequence[bytes], start: int) -> int:
    """Returns the length of the common beginning of two chains whose first `start` keys are known to be the same."""
    end = min(len(asked), len(own))
    return next((entry for entry in range(start, end) if asked[entry] != own[entry]), end)


def _name(number: int) -> str:
    """Returns the name of an export's lease, which no request id can equal."""
    return f"\0export {number}"
