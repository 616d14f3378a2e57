"""Request-level batching: the baseline of Orca. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cloister.scheduler.policies.base import BATCHING_THREAT, POLICIES, EngineView, OrderedQueue
from cloister.scheduler.policies.fcfs import FirstComeFirstServed, order_of_arrival
from cloister.scheduler.sequence import SequenceRecord


@POLICIES.register("static", BATCHING_THREAT)
class Static(FirstComeFirstServed):
    """When nothing runs, the waiting sequences form a batch, up to capacity; no sequence joins until the whole batch
    has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = OrderedQueue(order_of_arrival)
        self.push, self.peek, self.pop = self._push, self._peek, self._queue.pop
        self._newest = -1
        self._last_of_batch = -1
        self._running: Mapping[int, SequenceRecord] = {}

    def attach(self, view: EngineView) -> None:
        self._running = view.running

    def begin_step(self, now: float) -> bool:
        if not self._running:
            self._last_of_batch = self._newest
        return True

    def leave(self, sequence: SequenceRecord) -> None:
        self._last_of_batch = -1

    def _push(self, sequence: SequenceRecord) -> None:
        self._newest = max(self._newest, sequence.request_state.order)
        self._queue.push(sequence)

    def _peek(self) -> SequenceRecord | None:
        head = self._queue.peek()
        return head if head is not None and head.request_state.order <= self._last_of_batch else None
