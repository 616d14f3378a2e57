"""Adds replicas while requests wait, and removes them when fewer are enough. Pure: no clock, no I/O; randomness is given.

Load must last before anything happens, and must be much lower to remove a replica than to add one (hysteresis). A removal that
is soon followed by an addition was a mistake: the delay before the next removal doubles.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from cloister.cluster.routers.base import draw_by_capacity
from cloister.engine.replica_snapshot import ReplicaSnapshot, ReplicaState, Role
from cloister.types.threat import Requirement, ThreatProfile

FULL: Final = 0.95
"""A replica has no room from this share of used KV blocks."""
LOW: Final = 0.5
"""A replica may be removed if the others then use less than this share of their slots and KV blocks."""
LONG_PROMPTS_S: Final = 1.0
"""A replica is busy if the prompts that it has to compute take longer than this."""
MAX_PATIENCE: Final = 16
GONE: Final[frozenset[ReplicaState]] = frozenset({"lost", "draining", "drained", "suspicious"})
"""States in which a replica with an engine serves no requests."""

SCALING_THREAT: Final = ThreatProfile(
    row="instance flip",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="flood replicas, or leave, so that one is added or removed where others' requests run",
    mitigations=(
        "refused where the profile allows no choice by load",
        "which one is added or removed is drawn by capacity; counted in the log and in the metrics",
    ),
)


@dataclass(frozen=True, slots=True)
class ReplicaAddition:
    """A replica that is stopped gets an engine."""

    index: int


@dataclass(frozen=True, slots=True)
class ReplicaRemoval:
    """A replica is drained, and its engine ends."""

    index: int


class ScalingController:
    """Says when a replica is added or removed.

    One is added if all replicas of a role are busy for some time: requests wait for a slot, slots or KV blocks are in use, or
    prompts wait for long. It has this role, or is mixed if none of this role is left. One is removed if for a longer time the
    requests of its role would have had room in less than half of the others.

    At least `num_min` healthy replicas stay; lost and drained ones are replaced at once. The last one that prefills and the
    last one that decodes stay, and so does the last mixed one unless there are both. Replicas that stand by are left alone.

    Args:
        draw: chooses among those that qualify, by capacity.
        num_min: replicas that stay, at least 1.
        up_after_s: time that replicas are busy before one is added.
        down_after_s: time that fewer are enough before one is removed.
    """

    def __init__(self, draw: random.Random, num_min: int = 1, *, up_after_s: float = 1.0, down_after_s: float = 60.0) -> None:
        self._draw, self._num_min = draw, max(1, num_min)
        self._up_after_s, self._down_after_s = up_after_s, down_after_s
        self._busy_since_s: dict[Role, float] = {}
        self._low_since_s: dict[Role, float] = {}
        self._removed_s: float | None = None
        self._patience = 1

    def decide(self, replicas: Sequence[ReplicaSnapshot], now: float) -> ReplicaAddition | ReplicaRemoval | None:
        """Returns what is due. `replicas` are all, stopped ones too."""
        stopped = [r for r in replicas if r.is_stopped and r.state not in GONE]
        engines = [r for r in replicas if not (r.is_stopped or r.is_standby or r.state in GONE)]
        well = [r for r in engines if r.state != "starting"]
        if stopped and (missing := self._find_missing(engines, stopped)):
            return self._add(missing)
        busy = self._note_busy(well, now)
        low = self._note_low(well, now)
        if len(well) < len(engines):
            return None  # what was added, or starts again, is about to help
        for role in busy:
            if able := [r for r in stopped if r.role == role] or [r for r in stopped if r.role == "mixed"]:
                self._lose_patience(now)
                return self._add(able)
        if len(well) > self._num_min and (removable := [r for r in well if r.role in low and _can_go(r, well)]):
            self._removed_s = now
            self._low_since_s.clear()
            return ReplicaRemoval(draw_by_capacity(removable, self._draw).index)
        return None

    def _add(self, able: Sequence[ReplicaSnapshot]) -> ReplicaAddition:
        self._busy_since_s.clear()
        self._low_since_s.clear()
        return ReplicaAddition(draw_by_capacity(able, self._draw).index)

    def _find_missing(
        self, engines: Sequence[ReplicaSnapshot], stopped: Sequence[ReplicaSnapshot]
    ) -> Sequence[ReplicaSnapshot]:
        """Returns those that must be added without delay: too few are left, or none of a role that there must be."""
        roles = {r.role for r in engines}
        needed = _needed_roles(roles | {r.role for r in stopped}) - roles
        if alone := [r for r in stopped if r.role in needed]:
            return alone
        return stopped if len(engines) < self._num_min else ()

    def _note_busy(self, well: Sequence[ReplicaSnapshot], now: float) -> list[Role]:
        """Returns the roles whose replicas have all been busy for long enough."""
        pools = _by_role(well)
        busy = {role for role, pool in pools.items() if all(map(is_busy, pool))}
        self._busy_since_s = {role: self._busy_since_s.get(role, now) for role in busy}
        return [role for role in sorted(busy) if now - self._busy_since_s[role] >= self._up_after_s]

    def _note_low(self, well: Sequence[ReplicaSnapshot], now: float) -> set[Role]:
        """Returns the roles for which one replica less has been enough for long enough."""
        low = {role for role, pool in _by_role(well).items() if _has_spare(pool)}
        self._low_since_s = {role: self._low_since_s.get(role, now) for role in low}
        if self._removed_s is not None and now - self._removed_s >= 2 * self._patience * self._down_after_s:
            self._removed_s, self._patience = None, 1  # it was no mistake
        return {role for role in low if now - self._low_since_s[role] >= self._patience * self._down_after_s}

    def _lose_patience(self, now: float) -> None:
        if self._removed_s is not None:
            self._patience = min(MAX_PATIENCE, 2 * self._patience)
            self._removed_s = now


def choose_first(roles: Sequence[Role], num_min: int) -> set[int]:
    """Returns the replicas that start with the server: one of each role that there must be, and then in their order.

    Args:
        roles: of all replicas, without those that stand by.
        num_min: how many.
    """
    first = {roles.index(role) for role in _needed_roles(set(roles))}
    others = [index for index in range(len(roles)) if index not in first]
    return first | set(others[: max(0, num_min - len(first))])


def is_busy(replica: ReplicaSnapshot) -> bool:
    """Whether another request would wait at a replica."""
    waits = max(replica.num_queued, replica.num_waiting) > 0
    has_no_slot = 0 < replica.num_slots <= replica.num_requests
    has_no_room = replica.num_total_blocks > 0 and replica.num_used_blocks >= FULL * replica.num_total_blocks
    return waits or has_no_slot or has_no_room or replica.num_pending_tokens * replica.cost[1] > LONG_PROMPTS_S


def _has_spare(pool: Sequence[ReplicaSnapshot]) -> bool:
    """Whether a pool without one replica would use less than `LOW` of its slots and KV blocks."""
    if any(replica.num_queued for replica in pool):
        return False
    share = LOW * (len(pool) - 1) / len(pool)
    slots, blocks = sum(r.num_slots for r in pool), sum(r.num_total_blocks for r in pool)
    has_slots = sum(r.num_requests for r in pool) <= share * slots
    return has_slots and sum(r.num_used_blocks for r in pool) <= share * blocks


def _can_go(replica: ReplicaSnapshot, well: Sequence[ReplicaSnapshot]) -> bool:
    """Whether the others do all that requests need without this replica."""
    left = {other.role for other in well if other is not replica}
    return replica.is_accepting and _needed_roles(left | {replica.role}) <= left


def _needed_roles(roles: Collection[Role]) -> set[Role]:
    """Returns the roles that need a running replica: all but `mixed` if there are prefill and decode replicas."""
    return set(roles) - ({"mixed"} if {"prefill", "decode"} <= set(roles) else set())


def _by_role(replicas: Sequence[ReplicaSnapshot]) -> dict[Role, list[ReplicaSnapshot]]:
    return {role: [r for r in replicas if r.role == role] for role in {replica.role for replica in replicas}}
