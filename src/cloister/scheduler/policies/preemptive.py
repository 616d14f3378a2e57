"""Policies that change who runs while requests wait. Pure.

A step first has the decodes, then prompts in order of urgency, then what may be preempted: a few of the least urgent running
sequences, and only while a more urgent one lacks a slot or blocks. So prompts delay no stream by more than they would in order
of arrival.

What is preempted keeps its KV in the prefix cache while there is room, then in a KV tier if the engine has one, which loads it
beside the steps when the sequence is next; else it is computed again. A sequence that had to compute positions again is
preempted only after as many new ones: all that is computed again is at most twice what was computed for the first time.
"""

from __future__ import annotations

from heapq import nlargest

from cloister.scheduler.policies.base import EngineView, SchedulingPolicy
from cloister.scheduler.sequence import SequenceRecord, Status

MAX_EXPOSED = 4
"""Sequences that one step may preempt for others' sake."""
_LAST = 2**62


class PreemptionRecord:
    """What a policy notes about a sequence; policies add to it.

    Attributes:
        num_computed: positions computed so far, at most; computing them again after a preemption is not charged.
        num_owed: positions that it computes before it may be preempted again.
    """

    __slots__ = ("num_computed", "num_owed")

    def __init__(self) -> None:
        self.num_computed = self.num_owed = 0


class PreemptivePolicy(SchedulingPolicy):
    """Gives levels for what `urgency` says. Those who override a method that is not abstract call it."""

    level_slack = None

    def __init__(self) -> None:
        self._exposed: frozenset[int] = frozenset()
        self._is_short = False

    def attach(self, view: EngineView) -> None:
        self._view = view

    def urgency(self, sequence: SequenceRecord) -> int:
        """Returns a class of urgency, smaller first; one of a smaller class may take the place of one of a larger class."""
        raise NotImplementedError

    def new_record(self, sequence: SequenceRecord) -> PreemptionRecord:
        """Returns what is noted about a new sequence."""
        raise NotImplementedError

    def charge_new(self, sequence: SequenceRecord, start: int, end: int, num_decode: int) -> None:
        """Charges positions [start, end) that were computed for the first time, at most `num_decode` of them decodes."""

    def may_lose(self, sequence: SequenceRecord) -> bool:
        """Whether a running sequence may be preempted for another's sake."""
        record = self.record_of(sequence)
        return record.num_computed >= record.num_owed

    def record_of(self, sequence: SequenceRecord) -> PreemptionRecord:
        """Returns what is noted about a sequence."""
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
        is_short = self._is_short or len(running) >= self._view.max_num_seqs
        self._is_short = False
        self._exposed = frozenset()
        if is_short and first is not None:
            urgency = self.urgency(first)
            choices = (s for s in running if self.urgency(s) > urgency and self.may_lose(s))
            self._exposed = frozenset(s.seq_id for s in nlargest(MAX_EXPOSED, choices, key=self._order))
        return True

    def pass_over(self, sequence: SequenceRecord) -> bool:
        self._is_short = True
        return False

    def level(self, sequence: SequenceRecord) -> int:
        if sequence.seq_id in self._exposed:
            return _LAST  # also once it is preempted: this step must not plan it twice
        if sequence.status is Status.RUNNING and sequence.num_wanted <= 1:
            return 0
        return 1 + self.urgency(sequence)

    def displaces(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        return victim.seq_id in self._exposed and self.urgency(candidate) < self.urgency(victim)

    def _order(self, sequence: SequenceRecord) -> tuple[int, object]:
        return self.urgency(sequence), self.rank(sequence)
