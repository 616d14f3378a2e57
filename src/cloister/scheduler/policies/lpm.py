"""Longest prefix match first: cache-aware order (RadixAttention, Zheng et al. 2024, section 3, "cache-aware scheduling"). Pure.

Requests that share a prefix then run close together, before it is evicted. No request starves: a bounded number of later ones
may overtake it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from cloister.kv.prefix_cache import PREFIX_CACHE_THREAT
from cloister.scheduler.policies.base import POLICIES, EngineView
from cloister.scheduler.policies.overtaking import MAX_PASSES, WINDOW, OvertakingPolicy
from cloister.scheduler.sequence import SequenceRecord, Status


@POLICIES.register("lpm", PREFIX_CACHE_THREAT)
class LongestPrefixMatch(OvertakingPolicy):
    """The waiting sequence with the most cached tokens joins first; of equal ones the oldest.

    A step looks up those of the window once: each costs a lookup of every block of its prompt.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chosen: SequenceRecord | None = None
        self._num_cached: Callable[[SequenceRecord], int] = lambda sequence: 0

    def attach(self, view: EngineView) -> None:
        self._num_cached = view.count_cached

    def begin_step(self, now: float) -> bool:
        self._chosen = None  # the cache may have changed since the last step
        return True

    def choose(self) -> SequenceRecord | None:
        if self._chosen is None or self._chosen.status is not Status.WAITING:
            if any(s.status is not Status.WAITING for s in islice(self._waiting, WINDOW)):
                self.sweep()
            window = self._waiting[:WINDOW]
            overdue = next((s for s in window if self.record_of(s).num_passes >= MAX_PASSES), None)
            self._chosen = overdue or max(window, key=lambda s: (self._num_cached(s), -s.request_state.order), default=None)
        return self._chosen

    def _push(self, sequence: SequenceRecord) -> None:
        super()._push(sequence)
        self._chosen = None

    def _pop(self) -> SequenceRecord:
        chosen = super()._pop()
        self.record_of(chosen).num_passes = 0
        self._chosen = None
        return chosen
