"""Leases keep cached blocks that no sequence uses until another engine has loaded them. Pure: it takes `now`.

A lease holds a reference to each of its blocks. It ends when its time is over, when its blocks were fetched, or when a running
sequence needs them: no sequence waits for a lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from cloister.kv.pool import NO_BLOCK, BlockPool
from cloister.kv.prefix_cache import PrefixCache

LEASE_SHARE: Final = 0.5
"""Largest part of the blocks of each group that leases hold together."""


@dataclass(slots=True)
class _Lease:
    until_s: float
    tables: list[list[int]] = field(default_factory=list)
    chains: list[Sequence[bytes]] = field(default_factory=list)
    """The keys that it was taken with."""
    ending_keys: list[list[bytes]] = field(default_factory=list)
    """Chains of a scope of one request."""


class Leases:
    """Leases by name.

    Args:
        pool: pool of the blocks.
        cache: where they are cached.

    Attributes:
        on_end: called with the name of each lease that has ended.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool, self._cache = pool, cache
        self.on_end: Callable[[str], None] = lambda name: None
        self.by_name: dict[str, _Lease] = {}
        self._num_leases: Counter[int] = Counter()  # by block
        self._num_held = [0] * pool.num_groups  # blocks of each group with a lease
        self._num_most = [max(1, int(group.num_blocks * LEASE_SHARE)) for group in pool.groups]

    def __len__(self) -> int:
        return len(self.by_name)

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    @property
    def next_end_s(self) -> float | None:
        """When the next lease ends."""
        return min((lease.until_s for lease in self.by_name.values()), default=None)

    def take(
        self, name: str, keys: Sequence[bytes], until_s: float, *, start: int = 0, of_one_request: bool = False
    ) -> list[int]:
        """Leases what a request with these keys would find, as far as the share of leases reaches. Returns its block table,
        in entries of a block for each group.

        A name that is known gets these blocks too; its lease ends at the later of both times.

        Args:
            start: entries before it are neither leased nor returned.
            of_one_request: the keys are of a scope that ends with its request, and what it left ends with the lease.
        """
        table = self._match(keys, start)
        while table and (excess := self._count_excess(table)):
            table = self._match(keys[: max(0, start + len(table) // self._pool.num_groups - excess)], start)
        if not table:
            return []
        for block in _blocks(table):
            self._num_held[self._pool.group_of(block)] += block not in self._num_leases
            self._num_leases[block] += 1
        self._pool.share(_blocks(table))
        lease = self.by_name.setdefault(name, _Lease(until_s))
        lease.until_s = max(lease.until_s, until_s)
        lease.tables.append(table)
        lease.chains.append(keys)
        if of_one_request:
            lease.ending_keys.append(list(keys))
        return table

    def chains_of(self, name: str) -> Sequence[Sequence[bytes]]:
        """Returns the keys that a lease was taken with; nothing if it has ended."""
        lease = self.by_name.get(name)
        return () if lease is None else lease.chains

    def renew(self, name: str, until_s: float) -> None:
        """Sets when a lease ends that has not ended yet."""
        self.by_name[name].until_s = until_s

    def drop(self, name: str) -> None:
        """Ends a lease, if it has not ended."""
        lease = self.by_name.pop(name, None)
        if lease is None:
            return
        for table in lease.tables:
            for block in _blocks(table):
                self._num_leases[block] -= 1
                if not self._num_leases[block]:
                    del self._num_leases[block]
                    self._num_held[self._pool.group_of(block)] -= 1
            self._pool.release(reversed(_blocks(table)))  # so that the prefix cache gets leaves before their parents
        for keys in lease.ending_keys:
            self._cache.discard(keys)
        self.on_end(name)

    def drop_one(self) -> bool:
        """Ends the lease that would end first, because its blocks are needed; returns False if there is none."""
        if not self.by_name:
            return False
        self.drop(min(self.by_name, key=lambda name: self.by_name[name].until_s))
        return True

    def expire(self, now: float) -> None:
        """Ends the leases whose time is over."""
        for name in [name for name, lease in self.by_name.items() if lease.until_s <= now]:
            self.drop(name)

    def _match(self, keys: Sequence[bytes], start: int) -> list[int]:
        return self._cache.match(keys)[start * self._pool.num_groups :]

    def _count_excess(self, table: Sequence[int]) -> int:
        """Returns how many blocks of a table are too many, in the group where most are."""
        counts = self._num_held[:]
        for block in _blocks(table):
            counts[self._pool.group_of(block)] += block not in self._num_leases
        return max(0, max(count - most for count, most in zip(counts, self._num_most, strict=True)))


def _blocks(table: Sequence[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]
