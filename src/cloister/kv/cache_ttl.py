"""Time to live of a scope's unused cached blocks. Pure: it takes `now`."""

from __future__ import annotations

import heapq
from typing import Final

RETRY_S: Final = 1.0
"""Delay before a scope is checked again whose blocks were still in use at its deadline."""


class CacheTTL:
    """Deadlines by root of a prefix-key chain, with the keys cached under it. Scopes without a deadline are not included.

    Attributes:
        queue: heap of (earliest deadline, root); empty if no scope has a deadline, so a step then costs nothing.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[float, bytes]] = []
        self._deadlines: dict[bytes, float] = {}
        self._kept: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def renew(self, root: bytes, deadline_s: float) -> None:
        """Extends the deadline of everything cached under `root`."""
        known = self._deadlines.get(root)
        if known is not None and known >= deadline_s:
            return
        self._deadlines[root] = deadline_s
        if known is None:  # a stale time is corrected when it is popped, so the queue has one entry per scope
            heapq.heappush(self.queue, (deadline_s, root))

    def keep(self, root: bytes, key: bytes) -> None:
        """Records that a block is cached under `key`."""
        self._kept.setdefault(root, set()).add(key)

    def drop(self, root: bytes, key: bytes) -> None:
        """Records that the block is no longer cached."""
        keys = self._kept.get(root)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._kept[root]

    def take_due(self, now: float) -> list[tuple[bytes, set[bytes]]]:
        """Removes and returns (root, keys) of every scope whose deadline has passed."""
        due = []
        while self.queue and self.queue[0][0] <= now:
            _, root = heapq.heappop(self.queue)
            deadline_s = self._deadlines[root]
            if deadline_s > now:
                heapq.heappush(self.queue, (deadline_s, root))
                continue
            del self._deadlines[root]
            due.append((root, set(self._kept.get(root, ()))))
        return due
