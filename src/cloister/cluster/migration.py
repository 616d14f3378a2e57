"""Levels the load of replicas by moving requests that run (Llumnix, Sun et al. 2024, OSDI, section 4.4). Pure: no clock, no
I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.engine.replica_snapshot import ReplicaSnapshot, RequestSnapshot
from cloister.types.threat import Requirement, ThreatProfile

MIGRATION_THREAT: Final = ThreatProfile(
    row="request migration",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="steer in or out",
    mitigations=("by load only where the profile allows it; else only to drain a replica, to a target drawn by capacity",),
)


@dataclass(frozen=True, slots=True)
class Move:
    """A request goes on at another replica."""

    request_id: str
    target: int


class LoadBalancer:
    """Moves requests from the replica with the least freeness to that with the most.

    Freeness is how many KV blocks each request can still take (Llumnix, section 4.4.1). Only replicas of one role are compared.
    Two thresholds keep requests from going to and fro: a difference must last, and a request that was moved stays for a while.

    Args:
        ratio: the target's freeness must be so many times the source's.
        hold_s: for so long.
        rest_s: a request that was moved stays for at least this time.
    """

    def __init__(self, ratio: float = 2.0, hold_s: float = 1.0, rest_s: float = 10.0) -> None:
        self._ratio, self._hold_s, self._rest_s = ratio, hold_s, rest_s
        self._since_s: dict[tuple[int, int], float] = {}
        self._moved_s: dict[str, float] = {}

    def decide(
        self, replicas: Sequence[ReplicaSnapshot], requests: Mapping[int, Sequence[RequestSnapshot]], now: float
    ) -> list[Move]:
        """Returns the moves that are due: one at most for each role.

        Args:
            replicas: those that accept requests.
            requests: by replica.
        """
        self._moved_s = {name: at_s for name, at_s in self._moved_s.items() if now - at_s < self._rest_s}
        moves: list[Move] = []
        pairs: set[tuple[int, int]] = set()
        for role in sorted({replica.role for replica in replicas} - {"prefill"}):
            pool = [replica for replica in replicas if replica.role == role]
            source, target = min(pool, key=_rank), max(pool, key=_rank)
            if not self._is_uneven(source, target):
                continue
            pairs.add((source.index, target.index))
            if now - self._since_s.setdefault((source.index, target.index), now) < self._hold_s:
                continue
            chosen = self._choose(requests.get(source.index, ()))
            if chosen is not None:
                self._moved_s[chosen.request_id] = now
                moves.append(Move(chosen.request_id, target.index))
        self._since_s = {pair: since_s for pair, since_s in self._since_s.items() if pair in pairs}
        return moves

    def _is_uneven(self, source: ReplicaSnapshot, target: ReplicaSnapshot) -> bool:
        """Whether a move helps: afterwards the target must not be the busier one."""
        is_busier = (source.num_requests - 1) / source.capacity >= (target.num_requests + 1) / target.capacity
        return is_busier and freeness(target) > self._ratio * freeness(source) and not target.num_queued

    def _choose(self, requests: Sequence[RequestSnapshot]) -> RequestSnapshot | None:
        """Returns the least urgent request, of equal ones that with the least KV (Llumnix, section 4.4.2): it moves soonest."""
        free = [r for r in requests if r.num_output_tokens and r.request_id not in self._moved_s]
        return min(free, key=lambda r: (-r.priority, r.num_prompt_tokens + r.num_output_tokens, r.request_id), default=None)


def freeness(replica: ReplicaSnapshot) -> float:
    """Returns the KV blocks that each request of a replica can still take: none if some queue, all before its first step."""
    if not replica.num_total_blocks:
        return 0.0 if replica.num_requests else math.inf
    if replica.num_queued:
        return 0.0
    num_free = max(0, replica.num_total_blocks - replica.num_used_blocks)
    return num_free * replica.capacity / max(1, replica.num_requests)


def _rank(replica: ReplicaSnapshot) -> tuple[float, float, int]:
    return freeness(replica), -replica.num_requests / replica.capacity, replica.index
