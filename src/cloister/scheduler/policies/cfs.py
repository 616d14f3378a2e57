"""Completely fair scheduling of sequences in time slices (Aqua, Vijaya Kumar et al. 2025, section 5). Pure.

Every sequence has a count of its generated tokens. The sequence with the lowest count goes first, and preempts one that is a
slice ahead. A new sequence starts level with the lowest one, so in a burst each gets its first token after a slice or two of
those before it. Preempted KV, which Aqua keeps in another GPU's memory, stays in the prefix cache and a KV tier here
(`policies.preemptive`).
"""

from __future__ import annotations

from cloister.scheduler.policies.base import POLICIES, OrderedQueue
from cloister.scheduler.policies.preemptive import PreemptionRecord, PreemptivePolicy
from cloister.scheduler.sequence import SequenceRecord
from cloister.types.threat import Requirement, ThreatProfile

CFS_THREAT = ThreatProfile(
    row="priority scheduling",
    threats=frozenset({Requirement.NON_TARGETABLE}),
    attack="send many requests, each of which gets a share; tell from pauses how many others run",
    mitigations=(
        "the share follows from tokens generated, never from content, identity or cache hits",
        "`fair` divides between tenants",
    ),
)

SLICE_TOKENS = 32
"""Tokens that a sequence generates before one with fewer may preempt it. Each restart recomputes up to a block, so shorter
slices cost more."""


class _Share(PreemptionRecord):
    """The service that a sequence has received.

    Attributes:
        num_tokens: its generated tokens, plus the count at which it started.
    """

    __slots__ = ("num_tokens",)

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens


@POLICIES.register("cfs", CFS_THREAT)
class CompletelyFair(PreemptivePolicy):
    """All sequences advance equally, a slice at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._queue = OrderedQueue(lambda s: (self.urgency(s), s.request_state.order))
        self.push, self.peek, self.pop = self._queue.push, self._queue.peek, self._queue.pop
        self._floor = 0

    def urgency(self, sequence: SequenceRecord) -> int:
        return self._of(sequence).num_tokens // SLICE_TOKENS

    def rank(self, sequence: SequenceRecord) -> tuple[int, int]:
        return self._of(sequence).num_tokens, sequence.request_state.order

    def new_record(self, sequence: SequenceRecord) -> PreemptionRecord:
        return _Share(self._least())

    def charge_new(self, sequence: SequenceRecord, start: int, end: int, num_decode: int) -> None:
        self._of(sequence).num_tokens += num_decode

    def _least(self) -> int:
        """Returns the count at which a new sequence starts: the beginning of the slice of the lowest one."""
        active = list(self._view.running.values())
        if (first := self._queue.peek()) is not None:
            active.append(first)
        slices = [self.urgency(sequence) for sequence in active if sequence.scheduling is not None]
        self._floor = max(self._floor, min(slices, default=self._floor))
        return self._floor * SLICE_TOKENS

    def _of(self, sequence: SequenceRecord) -> _Share:
        share = self.record_of(sequence)
        assert isinstance(share, _Share)
        return share
