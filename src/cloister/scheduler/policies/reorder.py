"""Requests pass one that does not fit into memory, until the memory that they hold would suffice for it (FlashGen-Sched, Jeong
and Ahn 2025, section 4.2). Pure.

Order is by arrival. While the first waiting sequence lacks blocks or slots, later ones that fit start in the free memory; one
with a cached prefix needs less. As soon as the free memory and that of the later ones suffice for the first, they are preempted
for it. A bounded number may pass one.
"""

from __future__ import annotations

from itertools import islice

from cloister.scheduler.policies.base import POLICIES, EngineView
from cloister.scheduler.policies.fcfs import order_of_arrival
from cloister.scheduler.policies.overtaking import MAX_PASSES, WINDOW, OvertakingPolicy, WaitingRecord
from cloister.scheduler.sequence import SequenceRecord, Status
from cloister.types.threat import ThreatProfile

REORDER_THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV blocks until free",
    where=("device memory",),
    attack="reuse of an unwiped block; short requests that pass a long one tell its sender that memory is full",
    mitigations=(
        "wipe on free, before the block can be given to another request",
        "order follows from arrival and size, never from content or identity; a bounded number may pass one",
    ),
)

NUM_TRIES = 8
"""Number of waiting sequences that one step tries: each costs a look-up of every block of its prompt."""


class _Place(WaitingRecord):
    """A sequence's record.

    Attributes:
        has_passed: it started while an earlier one waited.
    """

    __slots__ = ("has_passed",)

    def __init__(self) -> None:
        super().__init__()
        self.has_passed = False


@POLICIES.register("reorder", REORDER_THREAT)
class Reorder(OvertakingPolicy):
    """Fills memory that the next request cannot use yet."""

    def __init__(self) -> None:
        super().__init__()
        self._tried: set[int] = set()
        self._freed: tuple[int, frozenset[int]] | None = None

    def attach(self, view: EngineView) -> None:
        self._view = view

    def begin_step(self, now: float) -> bool:
        self._tried.clear()
        self._freed = None
        return True

    def pass_over(self, sequence: SequenceRecord) -> bool:
        self._tried.add(sequence.seq_id)
        has_slot = len(self._view.running) < self._view.max_num_seqs
        return has_slot and len(self._tried) < NUM_TRIES and self.choose() is not None

    def level(self, sequence: SequenceRecord) -> int:
        """1 for sequences that have passed, or would pass, one that still waits."""
        first = self._first()
        has_passed = sequence.status is Status.WAITING or self._of(sequence).has_passed
        return int(has_passed and first is not None and order_of_arrival(sequence) > order_of_arrival(first))

    def may_preempt(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        if candidate is not self._first() or not self.level(victim):
            return False
        if self._freed is None or self._freed[0] != candidate.seq_id:
            passed = [s for s in self._view.running.values() if self.level(s)]
            suffices = self._view.would_fit(candidate, passed)
            self._freed = candidate.seq_id, frozenset(s.seq_id for s in passed) if suffices else frozenset()
        return victim.seq_id in self._freed[1]

    def new_record(self) -> WaitingRecord:
        return _Place()

    def _push(self, sequence: SequenceRecord) -> None:
        self._of(sequence).has_passed = False
        super()._push(sequence)

    def _pop(self) -> SequenceRecord:
        first, chosen = self._first(), super()._pop()
        self._of(chosen).has_passed = chosen is not first
        return chosen

    def _first(self) -> SequenceRecord | None:
        """Returns the waiting sequence that arrived first."""
        while self._waiting and self._waiting[0].status is not Status.WAITING:
            del self._waiting[0]
        return self._waiting[0] if self._waiting else None

    def choose(self) -> SequenceRecord | None:
        first = self._first()
        if first is None or first.seq_id not in self._tried:
            return first
        if self.record_of(first).num_passes >= MAX_PASSES:
            return None
        others = islice(self._waiting, 1, WINDOW)
        return next((s for s in others if s.status is Status.WAITING and s.seq_id not in self._tried), None)

    def _of(self, sequence: SequenceRecord) -> _Place:
        place = self.record_of(sequence)
        assert isinstance(place, _Place)
        return place
