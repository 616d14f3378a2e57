"""First come, first served, with iteration-level joining (Orca, Yu et al. 2022, section 3). Pure."""

from __future__ import annotations

from cloister.scheduler.policies.base import BATCHING_THREAT, POLICIES, OrderedQueue, SchedulingPolicy
from cloister.scheduler.sequence import SequenceRecord


def order_of_arrival(sequence: SequenceRecord) -> int:
    return sequence.request_state.order


@POLICIES.register("fcfs", BATCHING_THREAT)
class FirstComeFirstServed(SchedulingPolicy):
    """Requests join as soon as there is capacity, in order of arrival."""

    def __init__(self) -> None:
        queue = OrderedQueue(order_of_arrival)
        self.push, self.peek, self.pop = queue.push, queue.peek, queue.pop
