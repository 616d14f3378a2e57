"""The protocol of a router. Pure: no clock, no I/O; randomness is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.kv import PrefixKeys
from cloister.types.registry import Registry
from cloister.types.request import Request
from cloister.types.threat import Requirement, ThreatProfile

ROUTER_THREAT = ThreatProfile(
    row="machine-level scheduler",
    threats=frozenset({Requirement.ENFORCEABLE, Requirement.NON_TARGETABLE}),
    residue="cache map",
    where=("router",),
    attack="content-specific routing",
    mitigations=("router sees only blinded lease ids, chooses by capacity; affinity denied by default",),
)


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a router may use.

    Attributes:
        keys: computes the prefix keys of requests, as the replicas do.
        draw: source of randomness.
    """

    keys: PrefixKeys
    draw: random.Random


class Router(Protocol):
    """Chooses a replica for each request."""

    def pick(self, request: Request, replicas: Sequence[ReplicaSnapshot]) -> int:
        """Returns the index of one of `replicas`, all of which accept requests; there is at least one."""
        ...

    def forget(self, index: int) -> None:
        """Called when a replica's engine has ended: its cache is empty."""
        ...


ROUTERS: Registry[Callable[[RouterContext], Router]] = Registry("router")


def least_loaded(replicas: Sequence[ReplicaSnapshot]) -> ReplicaSnapshot:
    """Returns the replica with the fewest requests for its capacity; of equal ones that with the fewest pending tokens."""
    return min(replicas, key=lambda r: (r.num_requests / r.capacity, r.num_pending_tokens / r.capacity, r.index))
