"""Draft decisions, and the protocol of what makes them. Pure: no clock, no arrays, no content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.step import Sample


class DraftDecision(NamedTuple):
    """The draft decision of one sequence for a step.

    Attributes:
        drafter: name of the drafter; empty for no drafts.
        num_drafts: maximum number of tokens.
        parents: the shape of the tree; None lets the drafter choose.
        is_watched: drafters observe the model's output of this step.
    """

    drafter: str = ""
    num_drafts: int = 0
    parents: tuple[int, ...] | None = None
    is_watched: bool = False


NO_DRAFTS = DraftDecision()


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """The scheduler's description of a drafter.

    Attributes:
        max_drafts: maximum number of tokens for one sequence.
        shape: parents of its tree, filled best first; None if the drafter chooses.
        watches: it can draft only after steps that it observed.
    """

    max_drafts: int
    shape: tuple[int, ...] | None = None
    watches: bool = True

    def choose(self, drafter: str, num_drafts: int) -> DraftDecision:
        """Returns a decision for this many drafts of this drafter."""
        parents = None if self.shape is None else self.shape[:num_drafts]
        return DraftDecision(drafter, num_drafts, parents, self.watches)


class Speculation(Protocol):
    """Decides how many tokens to draft."""

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns a decision for each sequence that decodes in a step.

        Args:
            cost: cost model of steps, without drafting.
            size: size of the step without drafts: its decodes.
            num_left: tokens that still fit into the step in addition to its decodes.
        """
        ...

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None:
        """Records the outcome of a decision."""
        ...

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Records the time of drafting.

        Args:
            num_drafted: drafter -> (number of sequences, number of requested drafts).
            draft_s: drafter -> seconds.
        """
        ...

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        """Records the time of a step that only decoded.

        Args:
            size: its size, including verified drafts.
            num_drafted: number of verified drafts.
            elapsed_s: its time without drafting.
        """
        ...
