"""How long cached blocks of a scope may stay when nobody uses them. Pure: it takes `now`."""

from __future__ import annotations

import heapq

RETRY_S = 1.0
"""How much later a scope is looked at again whose blocks were still in use at its deadline."""


class CacheTTL:
    """Deadlines by the root of a prefix-key chain, and what is kept under it. Scopes without a deadline are not in here.

    Attributes:
        queue: (when it may be due, root), a heap; empty where no scope has a deadline, which costs a step nothing.
    """

    def __init__(self) -> None:
        self.queue: list[tuple[float, bytes]] = []
        self._deadlines: dict[bytes, float] = {}
        self._kept: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def renew(self, root: bytes, deadline_s: float) -> None:
        """Lets what is kept under `root` stay until a later time."""
        known = self._deadlines.get(root)
        if known is not None and known >= deadline_s:
            return
        self._deadlines[root] = deadline_s
        if known is None:  # a stale time is put right when it is popped, so the queue has one entry a scope
            heapq.heappush(self.queue, (deadline_s, root))

    def keep(self, root: bytes, key: bytes) -> None:
        """Notes that a block is cached under `key`."""
        self._kept.setdefault(root, set()).add(key)

    def drop(self, root: bytes, key: bytes) -> None:
        """Notes that it is not any more."""
        keys = self._kept.get(root)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._kept[root]

    def take_due(self, now: float) -> list[tuple[bytes, set[bytes]]]:
        """Returns (root, keys) of every scope whose deadline has passed, and forgets the deadline."""
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
