"""Per-scope quotas of the prefix cache, so that no tenant can infer others' activity from evictions. Pure.

Without quotas the cache is one least-recently-used list: a tenant can infer others' activity from evictions of its prefixes.
With quotas each scope may keep up to a share of the pool. It evicts only its own blocks to make room, and no other scope evicts
them. Running sequences use the rest of the pool, which all scopes share.
"""

from __future__ import annotations

CACHE_SHARE = 0.5
"""Largest part of the pool that is divided into shares."""


class CacheQuotas:
    """Counts cached blocks by owner.

    Args:
        num_scopes: number of concurrent owners. If all shares are taken, a further owner caches nothing until one is empty:
            taking another's share would reveal activity.
        per_scope: blocks in one share.
    """

    def __init__(self, num_scopes: int, per_scope: int) -> None:
        self.num_scopes = num_scopes
        self.per_scope = per_scope
        self._counts: dict[bytes, int] = {}

    @classmethod
    def plan(cls, num_scopes: int, num_blocks: int, num_for_one: int) -> CacheQuotas:
        """Divides a pool into shares.

        Args:
            num_blocks: blocks of the pool.
            num_for_one: blocks of the longest sequence, which must fit in addition to all shares.
        """
        room = min(int(num_blocks * CACHE_SHARE), num_blocks - num_for_one)
        return cls(num_scopes, max(0, room) // num_scopes)

    @property
    def total_blocks(self) -> int:
        """Total blocks of all shares."""
        return self.num_scopes * self.per_scope

    def has_share(self, owner: bytes) -> bool:
        """Whether an owner has a share, or a free one is available."""
        return owner in self._counts or len(self._counts) < self.num_scopes

    def is_full(self, owner: bytes) -> bool:
        """Whether an owner's share is full."""
        return self._counts.get(owner, 0) >= self.per_scope

    def add(self, owner: bytes) -> None:
        """Adds one block of an owner."""
        self._counts[owner] = self._counts.get(owner, 0) + 1

    def drop(self, owner: bytes) -> None:
        """Removes one block of an owner; its share becomes free after the last one."""
        left = self._counts[owner] - 1
        if left:
            self._counts[owner] = left
        else:
            del self._counts[owner]

    def keeps_any(self, owner: bytes) -> bool:
        """Whether an owner has cached blocks."""
        return owner in self._counts

    def check(self) -> None:
        """Raises AssertionError unless every count is within its limits."""
        assert len(self._counts) <= self.num_scopes, "more owners than shares"
        assert all(0 < count <= self.per_scope for count in self._counts.values()), "a share is overdrawn"
