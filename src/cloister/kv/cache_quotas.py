"""Per-scope quotas and lifetimes of the prefix cache, so that no tenant can infer others' activity from evictions. Pure.

Without quotas the cache is one least-recently-used list: a tenant that finds its prefix gone learns that others were busy.
With them a scope may keep up to a share of the pool; it makes room for a new block among its own, nobody else ever takes one of
them, and what runs gets along with the rest. What a share does not hold is there for all.
"""

from __future__ import annotations

import heapq

CACHE_SHARE = 0.5
"""At most this part of the pool is in shares."""


class CacheQuotas:
    """Counts kept blocks by owner.

    Args:
        num_scopes: owners at once. One that comes when all shares are taken keeps nothing until one is empty again: taking
            somebody's would show them that others are busy.
        per_scope: blocks of one share.
    """

    def __init__(self, num_scopes: int, per_scope: int) -> None:
        self.num_scopes = num_scopes
        self.per_scope = per_scope
        self._counts: dict[bytes, int] = {}

    @classmethod
    def plan(cls, num_scopes: int, num_blocks: int, num_for_one: int) -> CacheQuotas:
        """Shares out a pool.

        Args:
            num_blocks: of the pool.
            num_for_one: blocks of the longest sequence, which must still be able to run.
        """
        room = min(int(num_blocks * CACHE_SHARE), num_blocks - num_for_one)
        return cls(num_scopes, max(0, room) // num_scopes)

    @property
    def num_most(self) -> int:
        """Blocks of all shares together."""
        return self.num_scopes * self.per_scope

    def has_share(self, owner: bytes) -> bool:
        """Whether an owner has a share, or one is free for it."""
        return owner in self._counts or len(self._counts) < self.num_scopes

    def is_full(self, owner: bytes) -> bool:
        """Whether an owner keeps as much as it may."""
        return self._counts.get(owner, 0) >= self.per_scope

    def add(self, owner: bytes) -> None:
        """Counts one more block of an owner."""
        self._counts[owner] = self._counts.get(owner, 0) + 1

    def drop(self, owner: bytes) -> None:
        """Counts one block of an owner less; its share is free again after the last one."""
        left = self._counts[owner] - 1
        if left:
            self._counts[owner] = left
        else:
            del self._counts[owner]

    def keeps_any(self, owner: bytes) -> bool:
        """Whether an owner keeps a block."""
        return owner in self._counts

    def check(self) -> None:
        """Raises AssertionError unless every count is within its bounds."""
        assert len(self._counts) <= self.num_scopes, "more owners than shares"
        assert all(0 < count <= self.per_scope for count in self._counts.values()), "a share is overdrawn"


# Time to live of a scope's unused cached blocks. Pure: it takes `now`.


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
