"""Policies that preempt running sequences for more urgent waiting ones. Pure.

A step plans decodes first, then prompts in order of urgency, then preemptible sequences: a few of the least urgent running
ones, and only while a more urgent one lacks a slot or blocks. So prompts delay no stream by more than in order of arrival.

A preempted sequence keeps its KV in the prefix cache while there is room, then in a KV tier, which loads it beside the steps
when the sequence is next; else its KV is computed again. A sequence that had to compute positions again is preempted only after
as many new ones, so that recomputation is at most twice the first computation.
"""

from __future__ import annotations

from heapq import nlargest

from cloister.scheduler.policies.base import EngineView, SchedulingPolicy
from cloister.scheduler.sequence import SequenceRecord, Status

MAX_VICTIMS = 4
"""Maximum number of sequences that one step may preempt for more urgent ones."""
_LAST = 2**62


class PreemptionRecord:
    """A policy's record of a sequence; subclasses extend it.

    Attributes:
        num_computed: highest number of positions computed so far; computing them again after a preemption is not charged.
        num_owed: positions to compute before it may be preempted again.
    """

    __slots__ = ("num_computed", "num_owed")

    def __init__(self) -> None:
        self.num_computed = self.num_owed = 0


class PreemptivePolicy(SchedulingPolicy):
    """Maps `urgency` to levels. Subclasses that override a concrete method must call it."""

    level_slack = None

    def __init__(self) -> None:
        self._victims: frozenset[int] = frozenset()
        self._lacks_capacity = False

    def attach(self, view: EngineView) -> None:
        self._view = view

    def urgency(self, sequence: SequenceRecord) -> int:
        """Returns a class of urgency, smaller first; a sequence of a smaller class may preempt one of a larger class."""
        raise NotImplementedError

    def new_record(self, sequence: SequenceRecord) -> PreemptionRecord:
        """Returns the record of a new sequence."""
        raise NotImplementedError

    def charge_new(self, sequence: SequenceRecord, start: int, end: int, num_decode: int) -> None:
        """Charges positions [start, end) that were computed for the first time, at most `num_decode` of them decodes."""

    def is_preemptible(self, sequence: SequenceRecord) -> bool:
        """Whether a running sequence may be preempted for a more urgent one."""
        record = self.record_of(sequence)
        return record.num_computed >= record.num_owed

    def record_of(self, sequence: SequenceRecord) -> PreemptionRecord:
        """Returns the record of a sequence."""
        if sequence.scheduling is None:
            sequence.scheduling = self.new_record(sequence)
        assert isinstance(sequence.scheduling, PreemptionRecord)
        return sequence.scheduling

    def join(self, sequence: SequenceRecord) -> None:
        record = self.record_of(sequence)
        record.num_owed = 2 * record.num_computed - sequence.num_planned if record.num_computed else 0

    def charge(self, sequence: SequenceRecord, num_prefill: int, num_decode: int) -> None:
        record, end = self.record_of(sequence), sequence.num_committed + num_prefill + num_decode
        start = max(sequence.num_committed, record.num_computed)
        if end > start:
            record.num_computed = end
            self.charge_new(sequence, start, end, min(num_decode, end - start))

    def begin_step(self, now: float) -> bool:
        running, first = self._view.running.values(), self.peek()
        lacks_capacity = self._lacks_capacity or len(running) >= self._view.max_num_seqs
        self._lacks_capacity = False
        self._victims = frozenset()
        if lacks_capacity and first is not None:
            urgency = self.urgency(first)
            choices = (s for s in running if self.urgency(s) > urgency and self.is_preemptible(s))
            self._victims = frozenset(s.seq_id for s in nlargest(MAX_VICTIMS, choices, key=self._order))
        return True

    def pass_over(self, sequence: SequenceRecord) -> bool:
        self._lacks_capacity = True
        return False

    def level(self, sequence: SequenceRecord) -> int:
        if sequence.seq_id in self._victims:
            return _LAST  # also once it is preempted: this step must not plan it twice
        if sequence.status is Status.RUNNING and sequence.num_wanted <= 1:
            return 0
        return 1 + self.urgency(sequence)

    def may_preempt(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        return victim.seq_id in self._victims and self.urgency(candidate) < self.urgency(victim)

    def _order(self, sequence: SequenceRecord) -> tuple[int, object]:
        return self.urgency(sequence), self.rank(sequence)
