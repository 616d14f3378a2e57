"""Moves requests that run, as the load of replicas changes: to level it, to make room for one that waits, and to keep room for
urgent ones (Llumnix, Sun et al. 2024, OSDI, section 4.4). Pure: no clock, no I/O; randomness is given."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cloister.cluster.kv_room import KVRoom
from cloister.cluster.routers.base import draw_by_capacity
from cloister.engine.replica_snapshot import ReplicaSnapshot, RequestSnapshot
from cloister.types.threat import Requirement, ThreatProfile

MIGRATION_THREAT: Final = ThreatProfile(
    row="request migration",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="steer in or out",
    mitigations=(
        "only among replicas of one server; by load only where the profile allows it",
        "the target is drawn by capacity among those that qualify",
        "counted in the log and in the metrics",
    ),
)

Requests = Mapping[int, Sequence[RequestSnapshot]]
MoveReason = Literal["level", "room", "headroom"]


@dataclass(frozen=True, slots=True)
class Move:
    """A request moves to another replica.

    Attributes:
        reason: `level`: its replica is the busiest one. `room`: it waits, or makes room for one that does. `headroom`: it makes
            room for urgent ones to grow.
    """

    request_id: str
    target: int
    reason: MoveReason = "level"


class LoadBalancer:
    """Moves requests among the replicas of one role, by the first of three rules that has something to do.

    Room: a request that waits, while another replica has room for it, goes there. If none has, but the free blocks of all
    together would do, others leave its replica until there is room (defragmentation).

    Headroom: where urgent requests run (priority below 0), a share of the blocks is kept free, so that they can grow and more
    of them start at once. Less urgent requests leave for replicas without urgent ones, one after the other.

    Levelling: a request leaves the replica with the least freeness for one with much more. Freeness is how many KV blocks each
    request can still take (Llumnix, section 4.4.1); headroom counts as taken.

    Where several replicas qualify as the target, one is drawn by capacity. Two thresholds keep requests from going to and fro:
    a reason must last, and a request that was moved stays for a while.

    Args:
        draw: source of randomness.
        ratio: minimum ratio of the target's freeness to the source's.
        hold_s: minimum duration of that ratio, or of a lack of headroom.
        queue_s: minimum time that a request has waited.
        rest_s: a request that was moved stays for at least this time.
        headroom: share of the blocks of a replica.
    """

    def __init__(
        self,
        draw: random.Random,
        *,
        ratio: float = 2.0,
        hold_s: float = 1.0,
        queue_s: float = 0.5,
        rest_s: float = 10.0,
        headroom: float = 0.25,
    ) -> None:
        self._draw, self._headroom = draw, headroom
        self._ratio, self._hold_s, self._queue_s, self._rest_s = ratio, hold_s, queue_s, rest_s
        self._since_s: dict[tuple[MoveReason, object], float] = {}
        self._seen: set[tuple[MoveReason, object]] = set()
        self._moved_s: dict[str, float] = {}

    def decide(self, replicas: Sequence[ReplicaSnapshot], requests: Requests, now: float) -> list[Move]:
        """Returns the moves that are due, by one rule at most for each role.

        Args:
            replicas: those that accept requests.
            requests: by replica, in the order of their arrival.
        """
        self._moved_s = {name: at_s for name, at_s in self._moved_s.items() if now - at_s < self._rest_s}
        self._seen.clear()
        moves: list[Move] = []
        for role in sorted({replica.role for replica in replicas} - {"prefill"}):
            pool = [replica for replica in replicas if replica.role == role]
            room = KVRoom(pool, requests, self._draw)
            by_rule = [
                self._make_room(pool, requests, room, now),
                self._keep_headroom(pool, requests, room, now),
                self._level(pool, requests, now),
            ]
            moves += next(filter(None, by_rule), [])
        self._since_s = {reason: since_s for reason, since_s in self._since_s.items() if reason in self._seen}
        self._moved_s |= {move.request_id: now for move in moves}
        return moves

    def _lasts(self, reason: MoveReason, what: object, now: float, for_s: float) -> bool:
        """Whether something has been a reason for long enough."""
        self._seen.add((reason, what))
        return now - self._since_s.setdefault((reason, what), now) >= for_s

    # Room

    def _make_room(self, pool: Sequence[ReplicaSnapshot], requests: Requests, room: KVRoom, now: float) -> list[Move]:
        for replica in pool:
            waiting = [r for r in requests.get(replica.index, ()) if not (r.has_slot or r.is_held)]
            if not (replica.num_queued and waiting):
                continue
            first = min(waiting, key=lambda r: r.priority)
            if room.count_needed(first) <= room.count_free(replica.index):
                continue  # it waits for something else
            if not self._lasts("room", first.request_id, now, self._queue_s) or first.request_id in self._moved_s:
                continue
            others = {other.index for other in pool} - {replica.index}
            if (target := room.take(first, others)) is not None:
                return [Move(first.request_id, target, "room")]
            leaving = [r for r in self._movable(requests, replica.index) if r.priority >= first.priority]
            if moves := room.clear(replica.index, room.count_needed(first), leaving, others):
                return [Move(r.request_id, target, "room") for r, target in moves]
        return []

    # Headroom

    def _keep_headroom(self, pool: Sequence[ReplicaSnapshot], requests: Requests, room: KVRoom, now: float) -> list[Move]:
        calm = {replica.index for replica in pool if not _has_urgent(requests, replica.index)}
        for replica in pool:
            num_free = room.count_free(replica.index)
            if num_free >= self._kept_blocks(replica, requests):
                continue
            if self._lasts("headroom", replica.index, now, self._hold_s):
                leaving = [r for r in self._movable(requests, replica.index) if r.priority >= 0]
                if moves := room.clear(replica.index, num_free + 1, leaving, calm):
                    return [Move(r.request_id, target, "headroom") for r, target in moves]
        return []

    def _kept_blocks(self, replica: ReplicaSnapshot, requests: Requests) -> int:
        """Returns how many blocks of a replica are kept for urgent requests."""
        return math.ceil(self._headroom * replica.num_total_blocks) if _has_urgent(requests, replica.index) else 0

    # Levelling

    def _level(self, pool: Sequence[ReplicaSnapshot], requests: Requests, now: float) -> list[Move]:
        free = {replica.index: freeness(replica, self._kept_blocks(replica, requests)) for replica in pool}
        source = min(pool, key=lambda r: (free[r.index], -r.num_requests / r.capacity, r.index))
        targets = [target for target in pool if self._is_uneven(source, target, free)]
        due = [t for t in targets if self._lasts("level", (source.index, t.index), now, self._hold_s)]
        chosen = self._choose(requests, source.index)
        if not due or chosen is None:
            return []
        return [Move(chosen.request_id, draw_by_capacity(due, self._draw).index)]

    def _is_uneven(self, source: ReplicaSnapshot, target: ReplicaSnapshot, free: Mapping[int, float]) -> bool:
        """Whether a move helps: afterwards the target must not be the busier one."""
        is_busier = (source.num_requests - 1) / source.capacity >= (target.num_requests + 1) / target.capacity
        return is_busier and free[target.index] > self._ratio * free[source.index] and not target.num_queued

    def _choose(self, requests: Requests, index: int) -> RequestSnapshot | None:
        """Returns the least urgent request, of equal ones that with the least KV (Llumnix, section 4.4.2): it moves soonest."""
        return min(
            self._movable(requests, index),
            key=lambda r: (-r.priority, r.num_prompt_tokens + r.num_output_tokens, r.request_id),
            default=None,
        )

    def _movable(self, requests: Requests, index: int) -> list[RequestSnapshot]:
        """Returns the requests of a replica that have begun and may be moved."""
        return [r for r in requests.get(index, ()) if r.num_output_tokens and r.has_slot and r.request_id not in self._moved_s]


def freeness(replica: ReplicaSnapshot, num_kept: int = 0) -> float:
    """Returns the KV blocks that each request of a replica can still take: none if some queue, all before its first step.

    Args:
        num_kept: blocks that count as taken.
    """
    if not replica.num_total_blocks:
        return 0.0 if replica.num_requests else math.inf
    if replica.num_queued:
        return 0.0
    num_free = max(0, replica.num_total_blocks - replica.num_used_blocks - num_kept)
    return num_free * replica.capacity / max(1, replica.num_requests)


def _has_urgent(requests: Requests, index: int) -> bool:
    return any(r.priority < 0 for r in requests.get(index, ()))
