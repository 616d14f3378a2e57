"""KV that other engines load from this one (decisions/0022). Pure: no I/O, no clock; it takes `now`.

What is found when a query comes is leased until all of it was copied, so that no block is evicted or written in between.
Copies are made between two steps, a part at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Final

from cloister.kv import NO_BLOCK, KVQuery
from cloister.scheduler.kv_loads import KV_LOAD_TIMEOUT_S
from cloister.scheduler.request_table import RequestTable

MAX_EXPORTS: Final = 8
"""Engines that load at once; a further one is told that nothing is known."""


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
    query: KVQuery
    entries: list[KVEntry]


class KVExports:
    """All exports of one engine, by number.

    Args:
        requests: the scheduler's requests.
    """

    def __init__(self, requests: RequestTable) -> None:
        self._leases = requests.leases
        self._num_groups = requests.pool.num_groups
        self._windows = [group.window for group in requests.pool.groups]
        self._exports: dict[int, _Export] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """Exports that have not ended."""
        return len(self._exports)

    def open(self, query: KVQuery, now: float) -> int:
        """Looks up what a query asks for, and leases it. Returns the number of the export."""
        number = next(self._numbers)
        entries: list[KVEntry] = []
        if self._leases is not None and len(self._exports) < MAX_EXPORTS:
            table = self._leases.take(_name(number), query.keys, now + KV_LOAD_TIMEOUT_S)
            for entry in range(len(table) // self._num_groups):
                blocks = tuple(
                    NO_BLOCK if window is None and entry < query.num_known else block
                    for block, window in zip(
                        table[entry * self._num_groups : (entry + 1) * self._num_groups], self._windows, strict=True
                    )
                )
                if any(block != NO_BLOCK for block in blocks):
                    entries.append(KVEntry(entry, query.keys[entry], blocks))
        self._exports[number] = _Export(query, entries)
        return number

    def take(self, number: int, num_entries: int) -> list[KVEntry] | None:
        """Returns the next entries of an export, to be copied at once; none after the last one. None if its lease has ended
        before all were taken."""
        export = self._exports.get(number)
        if export is None:
            return None
        if export.entries and (self._leases is None or _name(number) not in self._leases):
            return None
        taken, export.entries = export.entries[:num_entries], export.entries[num_entries:]
        return taken

    def root_of(self, number: int) -> bytes:
        """Returns the root of the chain that an export is of."""
        return self._exports[number].query.root

    def is_done(self, number: int) -> bool:
        """Whether every entry was taken."""
        return not self._exports[number].entries

    def close(self, number: int, *, is_complete: bool) -> None:
        """Ends an export, and with it its lease.

        Args:
            is_complete: the other engine has all: what was held for it need not be held any more.
        """
        export = self._exports.pop(number, None)
        if export is not None and self._leases is not None:
            self._leases.drop(_name(number))
            if is_complete:
                self._leases.drop(export.query.request_id)


def _name(number: int) -> str:
    return f"export {number}"
