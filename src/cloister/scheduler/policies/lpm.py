"""Longest prefix match first: cache-aware order (RadixAttention, Zheng et al. 2024, section 3, "cache-aware scheduling"). Pure.

Requests that share a prefix then run close together, before it is evicted. No request starves: a bounded number of later ones
may overtake it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import islice

from cloister.kv.prefix_cache import PREFIX_CACHE_THREAT
from cloister.scheduler.policies.base import MIN_SWEEP, POLICIES, EngineView
from cloister.scheduler.policies.fcfs import FirstComeFirstServed, order_of_arrival
from cloister.scheduler.sequence import SequenceRecord, Status

WINDOW = 64
"""Number of waiting sequences, oldest first, that are looked up in the cache: each costs a lookup of every block of
its prompt."""
MAX_PASSES = 64
"""Number of later sequences that may overtake one; then it is next."""


@POLICIES.register("lpm", PREFIX_CACHE_THREAT)
class LongestPrefixMatch(FirstComeFirstServed):
    """The waiting sequence with the most cached tokens joins first; of equal ones the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.push, self.peek, self.pop = self._push, self._peek, self._pop
        self._waiting: list[SequenceRecord] = []
        self._sweep_at = MIN_SWEEP
        self._passes: dict[int, int] = {}
        self._chosen: SequenceRecord | None = None
        self._num_cached: Callable[[SequenceRecord], int] = lambda sequence: 0

    def attach(self, view: EngineView) -> None:
        self._num_cached = view.count_cached

    def begin_step(self, now: float) -> bool:
        self._chosen = None  # the cache may have changed since the last step
        return True

    def _push(self, sequence: SequenceRecord) -> None:
        if len(self._waiting) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._waiting))
        insort(self._waiting, sequence, key=order_of_arrival)
        self._chosen = None

    def _peek(self) -> SequenceRecord | None:
        if self._chosen is None or self._chosen.status is not Status.WAITING:
            if any(s.status is not Status.WAITING for s in islice(self._waiting, WINDOW)):
                self._sweep()
            window = self._waiting[:WINDOW]
            overdue = next((s for s in window if self._passes.get(s.seq_id, 0) >= MAX_PASSES), None)
            self._chosen = overdue or max(window, key=lambda s: (self._num_cached(s), -s.request_state.order), default=None)
        return self._chosen

    def _pop(self) -> SequenceRecord:
        chosen = self._peek()
        if chosen is None:
            raise IndexError("nobody waits")
        place = next(i for i, waiting in enumerate(self._waiting) if waiting is chosen)
        for passed in self._waiting[:place]:
            self._passes[passed.seq_id] = self._passes.get(passed.seq_id, 0) + 1
        self._passes.pop(chosen.seq_id, None)
        del self._waiting[place]
        self._chosen = None
        return chosen

    def _sweep(self) -> None:
        self._waiting = [s for s in self._waiting if s.status is Status.WAITING]
        left = {s.seq_id for s in self._waiting}
        self._passes = {seq_id: num for seq_id, num in self._passes.items() if seq_id in left}
