"""Policies that may admit a later sequence before an earlier one. Pure.

Each sequence counts how often it was overtaken, so that a policy can bound it.
"""

from __future__ import annotations

from bisect import insort

from cloister.scheduler.policies.base import MIN_SWEEP
from cloister.scheduler.policies.fcfs import FirstComeFirstServed, order_of_arrival
from cloister.scheduler.sequence import SequenceRecord, Status

WINDOW = 64
"""Number of waiting sequences, oldest first, among which the next is chosen."""
MAX_PASSES = 64
"""Number of later sequences that may overtake one; then it is next."""


class WaitingRecord:
    """A policy's record of a sequence; subclasses extend it.

    Attributes:
        num_passes: number of later sequences that started before it.
    """

    __slots__ = ("num_passes",)

    def __init__(self) -> None:
        self.num_passes = 0


class OvertakingPolicy(FirstComeFirstServed):
    """Subclasses define `choose`."""

    def __init__(self) -> None:
        super().__init__()
        self.push, self.peek, self.pop = self._push, self.choose, self._pop
        self._waiting: list[SequenceRecord] = []
        self._sweep_at = MIN_SWEEP

    def choose(self) -> SequenceRecord | None:
        """Returns the sequence to admit next, or None."""
        raise NotImplementedError

    def new_record(self) -> WaitingRecord:
        """Returns the record of a new sequence."""
        return WaitingRecord()

    def record_of(self, sequence: SequenceRecord) -> WaitingRecord:
        """Returns the record of a sequence."""
        if sequence.scheduling is None:
            sequence.scheduling = self.new_record()
        assert isinstance(sequence.scheduling, WaitingRecord)
        return sequence.scheduling

    def sweep(self) -> None:
        """Removes those that no longer wait."""
        self._waiting = [s for s in self._waiting if s.status is Status.WAITING]

    def _push(self, sequence: SequenceRecord) -> None:
        if len(self._waiting) >= self._sweep_at:
            self.sweep()
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._waiting))
        insort(self._waiting, sequence, key=order_of_arrival)

    def _pop(self) -> SequenceRecord:
        chosen = self.choose()
        if chosen is None:
            raise IndexError("no sequence waits")
        place = next(i for i, waiting in enumerate(self._waiting) if waiting is chosen)
        for passed in self._waiting[:place]:
            self.record_of(passed).num_passes += 1
        del self._waiting[place]
        return chosen
