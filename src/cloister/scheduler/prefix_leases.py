"""Leases of hot prefixes: on the engine that computed one, and on those that have a copy (decisions/0052). Pure: no I/O, no
clock; it takes `now`.

A copy is charged to no scope's share of the prefix cache. When its lease ends, for whatever reason, the copy and all that
continues it are dropped at once. A running sequence that needs its blocks ends the lease, like any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cloister.scheduler.kv_load import KVLoad
from cloister.scheduler.kv_loads import KVLoads
from cloister.scheduler.request_table import RequestTable
from cloister.types.events import PrefixLeased
from cloister.types.request import Request

PREFIX_SHARE: Final = 0.125
"""Largest part of the blocks of each group that all prefix leases together may hold."""


@dataclass(slots=True)
class _PrefixLease:
    """One lease, or a copy on its way.

    Attributes:
        root: of its chain.
        is_copy: its keys are revoked with it.
    """

    keys: list[bytes]
    root: bytes
    lease_s: float
    is_copy: bool
    is_held: bool = False


class PrefixLeases:
    """All prefix leases of one engine, by name.

    Args:
        requests: the scheduler's requests.
        loads: loads the copies.

    Attributes:
        news: reports for the front (`take_news`).
    """

    def __init__(self, requests: RequestTable, loads: KVLoads) -> None:
        self._requests, self._loads = requests, loads
        self._pool = requests.pool
        self._by_name: dict[str, _PrefixLease] = {}
        self.news: list[PrefixLeased] = []
        loads.on_copied = self._note_copied
        if requests.leases is not None:
            requests.leases.on_end = self._note_end

    def __len__(self) -> int:
        return len(self._by_name)

    def take_news(self) -> list[PrefixLeased]:
        """Removes and returns the reports for the front."""
        news, self.news = self.news, []
        return news

    def lease(self, request: Request, lease_s: float, now: float, *, is_copy: bool) -> None:
        """Leases the prefix of a request, whose id is the name of the lease; a copy is loaded first."""
        name = request.request_id
        keys, root, _ = self._requests.prefixes.chain_of(request, request.token_ids)
        if name in self._by_name or not keys or self._requests.leases is None or not self._has_room(len(keys)):
            self.refuse(name)
            return
        self._by_name[name] = _PrefixLease(keys, root, lease_s, is_copy)
        if is_copy:
            self._loads.copy(request, now)
        else:
            self._hold(name, now)

    def refuse(self, name: str) -> None:
        """Reports that there is no such lease."""
        self.news.append(PrefixLeased(name, 0))

    def renew(self, name: str, lease_s: float, now: float) -> None:
        """Extends a lease to `lease_s` from now; 0 ends it."""
        found = self._by_name.get(name)
        if found is None:
            if lease_s:
                self.refuse(name)
        elif not lease_s:
            self._end(name)
            self.news = [each for each in self.news if each.name != name]  # the front knows
            self._loads.cancel_prefetch(name, now)
        elif found.is_held and self._requests.leases is not None:
            self._requests.leases.renew(_named(name), now + lease_s)

    def forget(self, roots: Collection[bytes]) -> None:
        """Ends the leases of chains that are dropped."""
        for name in [name for name, found in self._by_name.items() if found.root in roots]:
            self._end(name)

    def check(self) -> None:
        """Raises AssertionError unless every copy in the prefix cache has a lease, or one on its way."""
        if self._requests.prefix_cache is not None:
            known = {key for found in self._by_name.values() if found.is_copy for key in found.keys}
            assert self._requests.prefix_cache.copied_keys <= known, "a copy has outlived its lease"

    def _has_room(self, num_entries: int) -> bool:
        """Whether prefix leases may hold this many more entries."""
        for group, shape in enumerate(self._pool.groups):
            held = sum(self._pool.max_blocks(group, len(found.keys)) for found in self._by_name.values())
            if held + self._pool.max_blocks(group, num_entries) > PREFIX_SHARE * shape.num_blocks:
                return False
        return True

    def _hold(self, name: str, now: float) -> None:
        """Leases the cached blocks of a prefix, if all of it is cached."""
        found, leases = self._by_name[name], self._requests.leases
        assert leases is not None
        table = leases.take(_named(name), found.keys, now + found.lease_s)
        if len(table) < len(found.keys) * self._pool.num_groups:
            self._end(name)
            return
        found.is_held = True
        self.news.append(PrefixLeased(name, len(found.keys) * self._pool.block_size))

    def _note_copied(self, load: KVLoad, now: float) -> None:
        name = load.request.request_id
        if name in self._by_name:
            self._hold(name, now)

    def _end(self, name: str) -> None:
        """Ends a lease, or the load of a copy."""
        assert self._requests.leases is not None
        if _named(name) in self._requests.leases:
            self._requests.leases.drop(_named(name))
        else:
            self._settle(name)

    def _note_end(self, named: str) -> None:
        name = named.removeprefix(_PREFIX)
        if named.startswith(_PREFIX) and name in self._by_name:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Revokes the keys of a copy that no other copy shares, and reports the end to the front."""
        ended = self._by_name.pop(name)
        cache = self._requests.prefix_cache
        if ended.is_copy and cache is not None:
            others = {key for found in self._by_name.values() if found.is_copy for key in found.keys}
            cache.revoke([key for key in ended.keys if key not in others])
        self.news.append(PrefixLeased(name, 0))


_PREFIX: Final = "prefix "


def _named(name: str) -> str:
    """The name of the lease in `kv.leases`."""
    return f"{_PREFIX}{name}"
