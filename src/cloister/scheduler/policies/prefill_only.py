"""Shortest prefill first, with aging (PrefillOnly, Du et al. 2025, section 6). Pure.

Requests for a score, a vector or one token end with their prompt, so their time is known: the predicted time of their uncached
tokens. The request with the least `T_prefill - FAIRNESS * T_queue` goes first. Both terms are updated before every choice: once
a prefix is cached, requests that begin with it have become short, and run before it is evicted.

All requests age equally, so a later one goes first only if it is shorter by more than `FAIRNESS` times the difference of their
arrivals. Hence no request is passed by one that arrived `T_prefill / FAIRNESS` after it.
"""

from __future__ import annotations

from heapq import nsmallest

from cloister.scheduler.policies.base import MIN_SWEEP, POLICIES, EngineView, SchedulingPolicy
from cloister.scheduler.policies.overtaking import WINDOW
from cloister.scheduler.sequence import SequenceRecord, Status
from cloister.scheduler.step_cost import StepSize
from cloister.types.threat import Requirement, ThreatProfile

PREFILL_ONLY_THREAT = ThreatProfile(
    row="prefix cache",
    threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
    residue="token KV",
    where=("device memory", "host memory"),
    attack="tell from who is served first what others' prompts left in the cache; short requests that pass a long one",
    mitigations=(
        "refused where others could feel it, as `lpm` is",
        "keys are seeded by the scope, so no scope is sooner because of another one's prefixes",
        "the order follows from lengths, hits and waiting; nobody is passed by what arrived `T_prefill / FAIRNESS` later",
    ),
)

FAIRNESS = 0.01
"""Seconds of prefill that a second of waiting outweighs (lambda in the paper)."""


@POLICIES.register("prefill_only", PREFILL_ONLY_THREAT)
class ShortestPrefillFirst(SchedulingPolicy):
    """The shortest prefill first. A running prefill yields to a shorter one inside a step, but is not preempted.

    A choice looks up the prefixes of `WINDOW` sequences: those that would be next if nothing was cached.
    """

    level_slack = None

    def __init__(self) -> None:
        self.push, self.peek, self.pop = self._push, self._peek, self._pop
        self._waiting: list[SequenceRecord] = []
        self._window: list[SequenceRecord] = []
        self._sweep_at = MIN_SWEEP
        self._chosen: SequenceRecord | None = None
        self._chosen_score = self._best_running = float("inf")

    def attach(self, view: EngineView) -> None:
        self._view = view

    def begin_step(self, now: float) -> bool:
        self._refill()
        prefills = (self.rank(s)[0] for s in self._view.running.values() if s.num_wanted > 1)
        self._best_running = min(prefills, default=float("inf"))
        return True

    def rank(self, sequence: SequenceRecord) -> tuple[float, int]:
        return self._score(sequence, sequence.num_planned), sequence.request_state.order

    def level(self, sequence: SequenceRecord) -> int:
        """Decodes come first, with running prefills unless the next waiting sequence is shorter than all of these."""
        makes_way = self._peek() is not None and self._chosen_score < self._best_running < float("inf")
        if sequence.status is Status.WAITING:
            return 1 if makes_way else 3
        return 2 if makes_way and sequence.num_wanted > 1 else 0

    def _score(self, sequence: SequenceRecord, num_done: int) -> float:
        """Returns `T_prefill - FAIRNESS * T_queue`, up to a term that is equal for all sequences. `T_prefill` is 0 before the
        first measured step."""
        size = StepSize().plus(num_done, max(1, len(sequence.token_ids) - num_done))
        return self._view.cost.predict(size) + FAIRNESS * sequence.request_state.arrival_s

    def _score_with_hits(self, sequence: SequenceRecord) -> tuple[float, int]:
        return self._score(sequence, self._view.count_cached(sequence)), sequence.request_state.order

    def _refill(self) -> None:
        """Refills the window of candidates."""
        self._waiting = [sequence for sequence in self._waiting if sequence.status is Status.WAITING]
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._waiting))
        self._window = nsmallest(WINDOW, self._waiting, key=self.rank)
        self._chosen = None

    def _push(self, sequence: SequenceRecord) -> None:
        self._waiting.append(sequence)
        self._window.append(sequence)
        self._chosen = None
        if len(self._waiting) >= self._sweep_at:
            self._refill()

    def _peek(self) -> SequenceRecord | None:
        if self._chosen is None or self._chosen.status is not Status.WAITING:
            if not self._window or any(sequence.status is not Status.WAITING for sequence in self._window):
                self._refill()
            self._chosen = min(self._window, key=self._score_with_hits, default=None)
            self._chosen_score = float("inf") if self._chosen is None else self._score_with_hits(self._chosen)[0]
        return self._chosen

    def _pop(self) -> SequenceRecord:
        chosen = self._peek()
        if chosen is None:
            raise IndexError("no sequence waits")
        self._waiting.remove(chosen)
        self._window.remove(chosen)
        self._chosen = None
        return chosen
