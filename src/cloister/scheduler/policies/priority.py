"""Priority classes, then deadlines, then arrival. Pure."""

from __future__ import annotations

from cloister.scheduler.policies.base import POLICIES, PRIORITY_THREAT, OrderedQueue
from cloister.scheduler.policies.fcfs import FirstComeFirstServed
from cloister.scheduler.sequence import Sequence


def urgency(sequence: Sequence) -> tuple[int, float, int]:
    """Sort key: class, then earliest deadline (EDF, Liu and Layland 1973), then arrival."""
    group = sequence.group
    return group.request.priority, group.deadline_s, group.order


@POLICIES.register("priority", PRIORITY_THREAT)
class Priority(FirstComeFirstServed):
    """Smaller classes go first, and take the place of larger ones when there is no room."""

    def __init__(self) -> None:
        queue = OrderedQueue(urgency)
        self.push, self.peek, self.pop = queue.push, queue.peek, queue.pop

    def level(self, sequence: Sequence) -> int:
        return sequence.group.request.priority

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return sequence.group.deadline_s, sequence.group.order

    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        return candidate.group.request.priority < victim.group.request.priority
