"""Skip-join multi-level feedback queue (FastServe, Wu et al. 2023, section 4.1). Pure; it takes `now`.

A sequence starts in the level whose quantum covers the predicted time of its prompt, and sinks by one level whenever it has
used a quantum. Quanta double from level to level, so short requests pass long ones without predicting the lengths of answers. A
sequence of an upper level preempts one of a lower level if slots or blocks are missing (`policies.preemptive`).
"""

from __future__ import annotations

from cloister.scheduler.policies.base import POLICIES, OrderedQueue
from cloister.scheduler.policies.preemptive import PreemptionRecord, PreemptivePolicy
from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.step_cost import StepSize
from cloister.types.threat import Requirement, ThreatProfile

MLFQ_THREAT = ThreatProfile(
    row="priority scheduling",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="split a long request into short ones, which go before others'; tell from a pause that short requests came",
    mitigations=(
        "the level follows from lengths and from work done, never from content, identity or cache hits",
        "a waiting request rises, so none can be held back for longer than a multiple of what was computed for them",
        "`fair` divides between tenants",
    ),
)

NUM_LEVELS = 16
"""The quantum of the last level is 32,768 times that of the first, which is one decode step."""
PATIENCE = 16.0
"""A sequence that has waited for this many quanta of its level rises by one. It waits at most about 2 * PATIENCE times the work
done for it until it is in the first level, where no new sequence passes it."""


class _Place(PreemptionRecord):
    """The queue position of a sequence.

    Attributes:
        used_s: time used in this level.
        since_s: time since when it has waited in this level.
    """

    __slots__ = ("level", "since_s", "used_s")

    def __init__(self, level: int, since_s: float) -> None:
        super().__init__()
        self.level, self.since_s = level, since_s
        self.used_s = 0.0


@POLICIES.register("mlfq", MLFQ_THREAT)
class MultiLevelFeedbackQueue(PreemptivePolicy):
    """Short requests first, without predicted lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.push, self.peek, self.pop = self._push, self._peek, self._pop
        self._queues = [OrderedQueue(lambda s: (self._of(s).since_s, s.request_state.order)) for _ in range(NUM_LEVELS)]
        self._quantum_s = 0.0
        self._now = 0.0

    def begin_step(self, now: float) -> bool:
        self._now = now
        self._quantum_s = self._view.cost.predict(StepSize().plus(0, 1))
        for level in range(1, NUM_LEVELS):
            self._raise_patient(level)
        return super().begin_step(now)

    def urgency(self, sequence: SequenceRecord) -> int:
        return self._of(sequence).level

    def rank(self, sequence: SequenceRecord) -> tuple[int, int]:
        return self._of(sequence).level, sequence.request_state.order

    def new_record(self, sequence: SequenceRecord) -> PreemptionRecord:
        return _Place(self._first_level(sequence), sequence.request_state.arrival_s)

    def charge_new(self, sequence: SequenceRecord, start: int, end: int, num_decode: int) -> None:
        place = self._of(sequence)
        place.used_s += self._view.cost.predict(StepSize().plus(start, end - start))
        while place.level < NUM_LEVELS - 1 and place.used_s >= self._quantum_of(place.level) > 0.0:
            place.used_s -= self._quantum_of(place.level)
            place.level += 1

    def _quantum_of(self, level: int) -> float:
        return self._quantum_s * 2.0**level

    def _first_level(self, sequence: SequenceRecord) -> int:
        """Returns the first level whose quantum covers the prompt. Prefix hits do not count: the order must not depend on
        content."""
        prompt_s = self._view.cost.predict(StepSize().plus(0, sequence.request_state.num_prompt_tokens))
        covering = (level for level in range(NUM_LEVELS) if self._quantum_of(level) >= prompt_s)
        return next(covering, NUM_LEVELS - 1)

    def _raise_patient(self, level: int) -> None:
        """Raises sequences that have waited too long in a level."""
        queue, limit_s = self._queues[level], PATIENCE * self._quantum_of(level)
        while (sequence := queue.peek()) is not None and self._now - self._of(sequence).since_s > limit_s > 0.0:
            queue.pop()
            place = self._of(sequence)
            place.level, place.since_s, place.used_s = level - 1, self._now, 0.0
            self._queues[level - 1].push(sequence)

    def _push(self, sequence: SequenceRecord) -> None:
        if sequence.scheduling is not None:
            self._of(sequence).since_s = self._now
        self._queues[self._of(sequence).level].push(sequence)

    def _peek(self) -> SequenceRecord | None:
        heads = (queue.peek() for queue in self._queues)
        return next((head for head in heads if head is not None), None)

    def _pop(self) -> SequenceRecord:
        return next(queue for queue in self._queues if queue.peek() is not None).pop()

    def _of(self, sequence: SequenceRecord) -> _Place:
        place = self.record_of(sequence)
        assert isinstance(place, _Place)
        return place
