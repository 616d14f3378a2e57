"""The protocol of a scheduling policy. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from cloister.scheduler.sequence import SequenceRecord, Status
from cloister.types.registry import Registry
from cloister.types.threat import Requirement, ThreatProfile

BATCHING_THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV blocks until free",
    where=("device memory",),
    attack="reuse of an unwiped block",
    mitigations=("wipe on free, before the block can be given to another request",),
)
PRIORITY_THREAT = ThreatProfile(
    row="priority scheduling",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="raise the target's priority",
    mitigations=("classes come from the credential's public class, never from content or identity",),
)


class SchedulingPolicy:
    """Orders who waits and who runs. Without more all sequences are of one level, rank by arrival and keep their places.

    A level is a class of urgency, smaller first. Prefill of one level holds up the levels behind it, but never its own
    level's decodes; decodes go before prefill inside a level (stall-free batching).

    Attributes:
        push: queues a waiting sequence; one that was preempted keeps its place of arrival.
        peek: returns who is admitted next, or None. Sequences that no longer wait are skipped.
        pop: removes and returns what `peek` returned.
    """

    push: Callable[[SequenceRecord], None]
    peek: Callable[[], SequenceRecord | None]
    pop: Callable[[], SequenceRecord]

    def attach_cache(self, num_cached: Callable[[SequenceRecord], int]) -> None:
        """Called once, before the first sequence: what says how many tokens of a waiting sequence the prefix cache holds."""

    def may_admit(self, num_running: int) -> bool:
        """Asked once a step: may sequences join the `num_running` that run?"""
        return True

    def level(self, sequence: SequenceRecord) -> int:
        return 0

    def rank(self, sequence: SequenceRecord) -> Any:
        """Sort key inside a level; the last one is preempted first."""
        return sequence.request_state.order

    def displaces(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        """True if `victim` may lose its place so that `candidate` can start."""
        return False

    def charge(self, sequence: SequenceRecord, num_prefill: int, num_decode: int) -> None:
        """Counts committed work against whom it was done for."""

    def join(self, sequence: SequenceRecord) -> None:
        """A sequence starts to run: popped from the queue, or forked."""

    def leave(self, sequence: SequenceRecord) -> None:
        """A running sequence ended or was preempted."""


MIN_SWEEP = 64
"""A queue shorter than this is not swept."""


class OrderedQueue:
    """Waiting sequences by a key that never changes while they wait. Those that ended are swept out, with their tokens."""

    def __init__(self, key: Callable[[SequenceRecord], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, SequenceRecord]] = []
        self._sweep_at = MIN_SWEEP

    def push(self, sequence: SequenceRecord) -> None:
        heapq.heappush(self._heap, (self._key(sequence), sequence.seq_id, sequence))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].status is Status.WAITING]
            heapq.heapify(self._heap)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))

    def peek(self) -> SequenceRecord | None:
        while self._heap and self._heap[0][2].status is not Status.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SequenceRecord:
        return heapq.heappop(self._heap)[2]


POLICIES: Registry[Callable[[], SchedulingPolicy]] = Registry("scheduling policy")
