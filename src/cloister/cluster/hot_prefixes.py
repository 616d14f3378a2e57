"""Replicates hot prefixes to less loaded replicas, under a lease that all copies share. Pure: no clock, no I/O; it takes `now`,
and randomness is given.

A prefix is identified by its prefix key, whose chain begins with the scope: prefixes are never compared by text or across
scopes. The replica that computed it keeps it under a lease, and so do those that copy it. All leases of a prefix are renewed
together and end together: when few requests begin with it any more, when its owner has dropped it, or when they are not
renewed.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec

from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.kv import PrefixKeys
from cloister.scheduler.sequence_prefixes import wants_every_position
from cloister.types.request import Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from cloister.types.threat import Requirement, ThreatProfile

DUPLICATION_THREAT: Final = ThreatProfile(
    row="duplication",
    threats=frozenset({Requirement.STATELESS, Requirement.NON_TARGETABLE}),
    residue="KV",
    where=("device memory", "host memory"),
    attack="data leak, difference analysis; raises hits",
    mitigations=("copies share one lease: they expire together and their keys are revoked together",),
)

MAX_KEYS: Final = 65_536
"""Maximum number of keys whose requests are counted; the least recently seen are forgotten."""
MAX_PREFIXES: Final = 16
"""Maximum number of prefixes with leases."""


@dataclass(frozen=True, slots=True)
class LeaseOrder:
    """Orders a replica to lease a prefix.

    Attributes:
        request: ends one token behind the prefix; its id is the name of the lease.
        source: replica to copy it from; None: the replica has it.
    """

    index: int
    request: Request
    lease_s: float
    source: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseRenewal:
    """Extends a replica's lease to `lease_s` from now; 0 ends it."""

    index: int
    name: str
    lease_s: float


LeaseAction = LeaseOrder | LeaseRenewal


@dataclass(slots=True)
class _KeyHeat:
    """Decayed count of requests with a key, by replica: each counts half after `HotPrefixes.half_life_s`.

    Attributes:
        at_s: time to which the counts are decayed.
        noted_s: time of the last request.
    """

    scope: Scope
    at_s: float
    noted_s: float
    by_replica: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def cool(self, now: float, half_life_s: float) -> None:
        """Decays the counts to `now`."""
        factor = 0.5 ** ((now - self.at_s) / half_life_s)
        for index in self.by_replica:
            self.by_replica[index] *= factor
        self.at_s = now

    @property
    def total(self) -> float:
        return sum(self.by_replica.values())


@dataclass(slots=True)
class _HotPrefix:
    """A prefix that has leases.

    Attributes:
        owner: the replica that computed it.
        leased: replicas that were told to lease it; True once they have.
    """

    key: bytes
    request: Request
    owner: int
    renewed_s: float
    leased: dict[int, bool] = field(default_factory=dict)


class HotPrefixes:
    """Finds hot prefixes, and decides which replicas copy, keep and drop them.

    Args:
        keys: computes the prefix keys of requests, as the replicas do.
        draw: names leases, and chooses among replicas that are equal.
        hot: decayed number of requests from which a prefix is hot.
        cold: decayed number of requests below which its copies are dropped.
        half_life_s: a request counts half after this time.
        min_tokens: minimum length of a prefix that is copied.
        min_skew: the owner has at least this many more requests than a replica that gets a copy.
        lease_s, renew_s: duration of a lease, and interval of its renewals.
        rest_s: delay before a failed copy is tried again.
    """

    def __init__(
        self,
        keys: PrefixKeys,
        draw: Random,
        *,
        hot: float = 3.0,
        cold: float = 1.0,
        half_life_s: float = 10.0,
        min_tokens: int = 64,
        min_skew: int = 2,
        lease_s: float = 10.0,
        renew_s: float = 3.0,
        rest_s: float = 10.0,
    ) -> None:
        self._keys, self._draw = keys, draw
        self._hot, self._cold, self.half_life_s = hot, cold, half_life_s
        self._min_blocks = max(1, -(-min_tokens // keys.block_size))
        self._min_skew = min_skew
        self._lease_s, self._renew_s, self._rest_s = lease_s, renew_s, rest_s
        self._heat: OrderedDict[bytes, _KeyHeat] = OrderedDict()  # the least recently used first
        self._candidates: dict[bytes, Request] = {}  # by the last key of a prefix that became hot
        self._prefixes: dict[str, _HotPrefix] = {}
        self._resting: dict[tuple[bytes, int], float] = {}

    def __len__(self) -> int:
        """Prefixes that have leases."""
        return len(self._prefixes)

    def owns(self, name: str) -> bool:
        """Whether this is the name of a lease."""
        return name.startswith(_NAME)

    def note(self, request: Request, index: int, now: float) -> None:
        """Counts a request that a replica is given."""
        if request.scope.kind is ScopeKind.REQUEST or request.images or request.documents is not None:
            return  # no later request can read its blocks, or its keys do not depend on its tokens alone
        if wants_every_position(request):
            return  # it uses no cache
        keys = self._keys.chain(request.scope, request.adapter, request.token_ids)
        num_hot = 0
        for key in reversed(keys):  # a chain is forgotten from its end
            heat = self._heat.setdefault(key, _KeyHeat(request.scope, now, now))
            self._heat.move_to_end(key)
            heat.cool(now, self.half_life_s)
            heat.noted_s = now
            heat.by_replica[index] += 1.0
        while num_hot < len(keys) and self._heat[keys[num_hot]].total >= self._hot:
            num_hot += 1
        while len(self._heat) > MAX_KEYS:
            self._heat.popitem(last=False)
        if num_hot >= self._min_blocks:
            self._candidates[keys[num_hot - 1]] = _cut(request, num_hot * self._keys.block_size)

    def decide(self, replicas: Sequence[ReplicaSnapshot], now: float) -> list[LeaseAction]:
        """Returns the actions that are due, at most one new lease for each prefix.

        Args:
            replicas: all that have the same weights.
        """
        self._resting = {each: until_s for each, until_s in self._resting.items() if until_s > now}
        actions = self._end_cold(now) + self._renew(now)
        self._candidates = {key: request for key, request in self._candidates.items() if self._total(key, now) >= self._hot}
        by_index = {replica.index: replica for replica in replicas}
        for key in sorted(self._candidates, key=lambda key: (-self._total(key, now), key)):
            if (order := self._spread(key, by_index, now)) is not None:
                actions.append(order)
        return actions

    def note_leased(self, name: str, index: int, num_tokens: int, now: float) -> list[LeaseAction]:
        """Notes that a replica has a lease, or has none any more (`num_tokens` 0); returns the actions that follow."""
        found = self._prefixes.get(name)
        if found is None or index not in found.leased:
            return [] if not num_tokens else [LeaseRenewal(index, name, 0.0)]  # it was ended meanwhile
        if num_tokens >= len(found.request.token_ids) - 1:
            found.leased[index] = True
            return []
        self._resting[found.key, index] = now + self._rest_s
        del found.leased[index]
        return self._end(name) if index == found.owner else []

    def is_copy(self, name: str, index: int) -> bool:
        """Whether a replica has a copy under a lease."""
        found = self._prefixes.get(name)
        return found is not None and index != found.owner and found.leased.get(index, False)

    def request_of(self, name: str) -> Request | None:
        """Returns a request with the prefix of a lease."""
        found = self._prefixes.get(name)
        return None if found is None else found.request

    def lose(self, index: int) -> list[LeaseAction]:
        """Notes that the engine of a replica has ended; the copies of prefixes that it computed are dropped."""
        for heat in self._heat.values():
            heat.by_replica.pop(index, None)
        actions: list[LeaseAction] = []
        for name, found in list(self._prefixes.items()):
            found.leased.pop(index, None)
            if found.owner == index:
                actions += self._end(name)
        return actions

    def forget(self, scope: Scope) -> list[LeaseAction]:
        """Ends all leases of a scope whose cache is dropped."""
        gone = [name for name, found in self._prefixes.items() if found.request.scope == scope]
        actions = [action for name in gone for action in self._end(name)]
        self._candidates = {key: request for key, request in self._candidates.items() if request.scope != scope}
        self._heat = OrderedDict((key, heat) for key, heat in self._heat.items() if heat.scope != scope)
        return actions

    def _total(self, key: bytes, now: float) -> float:
        heat = self._heat.get(key)
        if heat is None:
            return 0.0
        heat.cool(now, self.half_life_s)
        return heat.total

    def _lease_for(self, key: bytes, now: float) -> float:
        """Returns the duration of a lease, limited by the scope's cache lifetime; 0 if it is over."""
        heat = self._heat.get(key)
        if heat is None:
            return 0.0
        lifetime_s = heat.scope.lifetime_s
        return self._lease_s if lifetime_s is None else max(0.0, min(self._lease_s, heat.noted_s + lifetime_s - now))

    def _end(self, name: str) -> list[LeaseAction]:
        found = self._prefixes.pop(name)
        return [LeaseRenewal(index, name, 0.0) for index in sorted(found.leased)]

    def _end_cold(self, now: float) -> list[LeaseAction]:
        cold = [
            name
            for name, found in self._prefixes.items()
            if self._total(found.key, now) < self._cold or not self._lease_for(found.key, now)
        ]
        return [action for name in cold for action in self._end(name)]

    def _renew(self, now: float) -> list[LeaseAction]:
        actions: list[LeaseAction] = []
        for name, found in self._prefixes.items():
            if now - found.renewed_s >= self._renew_s:
                found.renewed_s = now
                lease_s = self._lease_for(found.key, now)
                actions += [LeaseRenewal(index, name, lease_s) for index in sorted(found.leased)]
        return actions

    def _spread(self, key: bytes, replicas: dict[int, ReplicaSnapshot], now: float) -> LeaseOrder | None:
        """Returns the next lease of a hot prefix: first for its owner, then for a replica that copies it."""
        name = next((name for name, found in self._prefixes.items() if found.key == key), None)
        found = None if name is None else self._prefixes[name]
        heat = self._heat[key]
        owner = found.owner if found is not None else self._find_owner(key, heat, replicas)
        if owner is None or owner not in replicas:
            return None
        target = self._find_target(key, heat, replicas[owner], found, replicas)
        if target is None:
            return None
        lease_s = self._lease_for(key, now)
        if found is None:
            if len(self._prefixes) >= MAX_PREFIXES or not lease_s:
                return None
            name = f"{_NAME}{self._draw.getrandbits(64):016x}"
            request = msgspec.structs.replace(self._candidates[key], request_id=name)
            self._prefixes[name] = _HotPrefix(key, request, owner, now, {owner: False})
            return LeaseOrder(owner, request, lease_s)
        if not all(found.leased.values()):
            return None  # one after the other
        found.leased[target] = False
        return LeaseOrder(target, found.request, lease_s, source=owner)

    def _find_owner(self, key: bytes, heat: _KeyHeat, replicas: dict[int, ReplicaSnapshot]) -> int | None:
        """Returns the replica that got most requests with a prefix."""
        able = [
            (count, index)
            for index, count in heat.by_replica.items()
            if count > 0.0 and index in replicas and replicas[index].can_prefill and (key, index) not in self._resting
        ]
        return max(able)[1] if able else None

    def _find_target(
        self,
        key: bytes,
        heat: _KeyHeat,
        owner: ReplicaSnapshot,
        found: _HotPrefix | None,
        replicas: dict[int, ReplicaSnapshot],
    ) -> int | None:
        """Returns the replica with the fewest requests that has not computed the prefix itself; of equal ones one is drawn."""
        able = [
            replica
            for index, replica in replicas.items()
            if index != owner.index
            and replica.is_accepting
            and replica.can_prefill
            and not (replica.is_idle or replica.is_slow)
            and (found is None or index not in found.leased)
            and (key, index) not in self._resting
            and heat.by_replica.get(index, 0.0) < 1.0
            and owner.num_requests >= replica.num_requests + self._min_skew
        ]
        if not able:
            return None
        least = min(replica.num_requests for replica in able)
        return self._draw.choice([replica.index for replica in able if replica.num_requests == least])


_NAME: Final = "hot-prefix-"


def _cut(request: Request, num_tokens: int) -> Request:
    """Returns a request that ends one token behind its first `num_tokens`, with nothing else of it."""
    return Request(
        request_id="",
        token_ids=request.token_ids[: num_tokens + 1],
        sampling=SamplingParams(max_tokens=1),
        scope=request.scope,
        adapter=request.adapter,
        tenant=request.tenant,
    )
