"""The protocol of a scheduling policy. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cloister.scheduler.sequence import RequestState, SequenceRecord, Status
from cloister.scheduler.step_cost import StepCost
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


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a policy may ask of its scheduler.

    Attributes:
        cost: the measured cost of steps.
        max_num_seqs: sequences that run at once.
        num_kv_tokens: KV positions of the whole pool.
        running: running sequences, by id.
        count_cached: returns how many tokens of a waiting sequence are cached.
        would_fit: returns whether a waiting sequence would have a slot and blocks if these running ones left.
    """

    cost: StepCost
    max_num_seqs: int
    num_kv_tokens: int
    running: Mapping[int, SequenceRecord]
    count_cached: Callable[[SequenceRecord], int]
    would_fit: Callable[[SequenceRecord, Collection[SequenceRecord]], bool]


class SchedulingPolicy:
    """Orders waiting and running sequences. By default all sequences have one level, are ordered by arrival and are not
    preempted.

    A level is a class of urgency, smaller first. Prefill of one level delays less urgent levels, but never the decodes of its
    own; inside a level decodes precede prefill (stall-free batching).

    Attributes:
        level_slack: work of a less urgent level may lengthen a step with prefill of a more urgent one by this ratio; None: by
            as much as the step's budget permits.
        push: queues a waiting sequence; a preempted one keeps its arrival rank.
        peek: returns the sequence to admit next, or None. Skips sequences that no longer wait.
        pop: removes and returns what `peek` returned.
    """

    level_slack: float | None = 1.1
    push: Callable[[SequenceRecord], None]
    peek: Callable[[], SequenceRecord | None]
    pop: Callable[[], SequenceRecord]

    def attach(self, view: EngineView) -> None:
        """Called once, before the first sequence."""

    def begin_step(self, now: float) -> bool:
        """Called before each step is filled. Returns whether sequences may join the running ones."""
        return True

    def pass_over(self, sequence: SequenceRecord) -> bool:
        """Called when what `peek` returned lacks slots or blocks. Returns whether `peek` has another one for this step."""
        return False

    def choose_search(self, held: Collection[RequestState]) -> RequestState:
        """Returns the beam search that is queued next, of those that wait for room in their share (`BeamSearches.admit`)."""
        return min(held, key=lambda state: state.order)

    def level(self, sequence: SequenceRecord) -> int:
        return 0

    def rank(self, sequence: SequenceRecord) -> Any:
        """Sort key inside a level; the last sequence is preempted first."""
        return sequence.request_state.order

    def may_preempt(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        """True if `victim` may be preempted so that `candidate` can start."""
        return False

    def charge(self, sequence: SequenceRecord, num_prefill: int, num_decode: int) -> None:
        """Charges committed work to its sequence."""

    def skip(self, sequence: SequenceRecord, num_prefill: int) -> None:
        """Called when a running sequence takes KV that was computed meanwhile, in place of computing these positions."""

    def join(self, sequence: SequenceRecord) -> None:
        """Called when a sequence starts to run: popped from the queue, or forked."""

    def leave(self, sequence: SequenceRecord) -> None:
        """Called when a running sequence has ended or was preempted."""


MIN_SWEEP = 64
"""Minimum length of a queue that is swept."""


class OrderedQueue:
    """Waiting sequences, ordered by a key that is constant while they wait. Ended ones are swept out, with their tokens."""

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
