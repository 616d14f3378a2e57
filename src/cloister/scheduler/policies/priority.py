"""Priority classes, then deadlines, then arrival. Pure."""

from __future__ import annotations

from collections.abc import Collection

from cloister.scheduler.policies.base import POLICIES, PRIORITY_THREAT, OrderedQueue
from cloister.scheduler.policies.fcfs import FirstComeFirstServed
from cloister.scheduler.sequence import RequestState, SequenceRecord


def urgency(sequence: SequenceRecord) -> tuple[int, float, int]:
    """Sort key of a sequence."""
    return urgency_of(sequence.request_state)


def urgency_of(state: RequestState) -> tuple[int, float, int]:
    """Sort key: class, then earliest deadline (EDF, Liu and Layland 1973), then arrival."""
    return state.request.priority, state.deadline_s, state.order


@POLICIES.register("priority", PRIORITY_THREAT)
class Priority(FirstComeFirstServed):
    """Smaller classes go first, and preempt larger ones when there is no capacity."""

    def __init__(self) -> None:
        queue = OrderedQueue(urgency)
        self.push, self.peek, self.pop = queue.push, queue.peek, queue.pop

    def choose_search(self, held: Collection[RequestState]) -> RequestState:
        return min(held, key=urgency_of)

    def level(self, sequence: SequenceRecord) -> int:
        return sequence.request_state.request.priority

    def rank(self, sequence: SequenceRecord) -> tuple[float, int]:
        return sequence.request_state.deadline_s, sequence.request_state.order

    def may_preempt(self, candidate: SequenceRecord, victim: SequenceRecord) -> bool:
        return candidate.request_state.request.priority < victim.request_state.request.priority
