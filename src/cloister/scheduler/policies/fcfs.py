"""First come, first served, with iteration-level joining (Orca, Yu et al. 2022, section 3). Pure."""

from __future__ import annotations

from collections.abc import Callable

from cloister.scheduler.policies.base import BATCHING_THREAT, POLICIES, OrderedQueue
from cloister.scheduler.sequence import Sequence


def order_of_arrival(sequence: Sequence) -> int:
    return sequence.group.order


@POLICIES.register("fcfs", BATCHING_THREAT)
class FirstComeFirstServed:
    """Requests join as soon as there is room, in the order in which they came."""

    def __init__(self) -> None:
        queue = OrderedQueue(order_of_arrival)
        self.push, self.peek, self.pop = queue.push, queue.peek, queue.pop

    def attach_cache(self, num_cached: Callable[[Sequence], int]) -> None:
        """The order does not follow the cache."""

    def may_admit(self, num_running: int) -> bool:
        return True

    def level(self, sequence: Sequence) -> int:
        return 0

    def rank(self, sequence: Sequence) -> int:
        return sequence.group.order

    def displaces(self, candidate: Sequence, victim: Sequence) -> bool:
        return False

    def charge(self, sequence: Sequence, num_prefill: int, num_decode: int) -> None:
        """Nobody keeps accounts here."""

    def join(self, sequence: Sequence) -> None:
        """Nobody keeps accounts here."""

    def leave(self, sequence: Sequence) -> None:
        """Nobody keeps accounts here."""
