"""A fixed number of drafts for every sequence, regardless of acceptance: for tests, benchmarks and manual tuning. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation.decision import NO_DRAFTS, DraftDecision, DrafterLimits
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.step import Sample


class FixedSpeculation:
    """Always requests the same number of tokens from one drafter (protocol `Speculation`); learns nothing.

    Args:
        drafter: its name.
        num_drafts: tokens for one sequence, within the limits of the drafter and the step.
    """

    def __init__(self, drafter: str, num_drafts: int, limits: DrafterLimits) -> None:
        self._num_drafts = min(num_drafts, limits.max_drafts)
        self._choices = [
            limits.choose(drafter, num) if num else NO_DRAFTS._replace(is_watched=limits.watches)
            for num in range(self._num_drafts + 1)
        ]

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns this number of drafts for each sequence; the last sequences get fewer if the step is full."""
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
