"""What a sequence drafts in a step, and who decides it. Pure: no clock, no arrays, no content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cloister.scheduler.budget import StepCost, StepSize
from cloister.scheduler.sequence import SequenceRecord
from cloister.types.step import Sample


class DraftDecision(NamedTuple):
    """What one sequence drafts in a step.

    Attributes:
        drafter: by name; empty drafts nothing.
        num_drafts: tokens at most.
        parents: the shape of the tree; None leaves it to the drafter.
        is_watched: the drafters are shown what the model says in this step.
    """

    drafter: str = ""
    num_drafts: int = 0
    parents: tuple[int, ...] | None = None
    is_watched: bool = False


NO_DRAFTS = DraftDecision()


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """What the scheduler knows of a drafter.

    Attributes:
        max_drafts: tokens at most for one sequence.
        shape: parents of the tree that it fills best first; None if it decides itself.
        watches: it drafts only after steps that it was shown.
    """

    max_drafts: int
    shape: tuple[int, ...] | None = None
    watches: bool = True

    def choose(self, drafter: str, num_drafts: int) -> DraftDecision:
        """Returns the choice of so many drafts, under this drafter's name."""
        parents = None if self.shape is None else self.shape[:num_drafts]
        return DraftDecision(drafter, num_drafts, parents, self.watches)


class Speculation(Protocol):
    """Says how many tokens to draft."""

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns a choice for each sequence that decodes in a step.

        Args:
            cost: what steps of the model cost, drafting aside.
            size: what the step does without drafts: its decodes.
            num_left: tokens that the step may still hold beside its decodes.
        """
        ...

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None:
        """Takes in what became of a choice."""
        ...

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Takes in what drafting took.

        Args:
            num_drafted: drafter -> (sequences that it was asked for, drafts that it was asked for).
            draft_s: drafter -> seconds that it took.
        """
        ...

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        """Takes in what a step took that did nothing but decode.

        Args:
            size: what it did, drafts that were verified included.
            num_drafted: drafts that were verified.
            elapsed_s: time that it took, drafting aside.
        """
        ...
