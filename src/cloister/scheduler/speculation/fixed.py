"""The same number of drafts for everybody, whatever they bring: for tests, measurements, and who knows better. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloister.scheduler.budget import StepCost, StepSize
from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation.decision import NO_DRAFTS, DraftDecision, DrafterLimits
from cloister.types.step import Sample


class FixedSpeculation:
    """Always asks one drafter for the same number of tokens (protocol `Speculation`); learns nothing.

    Args:
        drafter: by name.
        num_drafts: tokens for one sequence, as far as the drafter's limits and the step allow.
    """

    def __init__(self, drafter: str, num_drafts: int, limits: DrafterLimits) -> None:
        self._num_drafts = min(num_drafts, limits.max_drafts)
        self._choices = [
            limits.choose(drafter, num) if num else NO_DRAFTS._replace(is_watched=limits.watches)
            for num in range(self._num_drafts + 1)
        ]

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns that many drafts for each sequence; the last ones go short where the step is full."""
        choices = []
        for _ in sequences:
            num = min(self._num_drafts, max(0, num_left))
            num_left -= num
            choices.append(self._choices[num])
        return choices

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None:
        """Nothing to learn."""

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Nothing to learn."""

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        """Nothing to learn."""
