"""How many tokens each sequence drafts: as many as pay, none where that would cost. Pure: no clock, no arrays, no content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cloister.sched.budget import StepCost, StepSize
from cloister.sched.sequence import Sequence as Running
from cloister.types.step import Sample


class Choice(NamedTuple):
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


NO_DRAFTS = Choice()


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """What the mind knows of a drafter.

    Attributes:
        max_drafts: tokens at most for one sequence.
        shape: parents of the tree that it fills best first; None if it decides itself.
    """

    max_drafts: int
    shape: tuple[int, ...] | None = None


class Speculation(Protocol):
    """Says how many tokens to draft."""

    def choose(self, sequences: Sequence[Running], cost: StepCost, size: StepSize, num_left: int) -> list[Choice]:
        """Returns a choice for each sequence that decodes in a step.

        Args:
            cost: what steps of the model cost, drafting aside.
            size: what the step does without drafts: its decodes.
            num_left: tokens that the step may still hold beside its decodes.
        """
        ...

    def learn(self, sequence: Running, choice: Choice, sample: Sample) -> None:
        """Takes in what became of a choice."""
        ...

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Takes in what drafting took.

        Args:
            num_drafted: drafter -> (sequences that it was asked for, drafts that it was asked for).
            draft_s: drafter -> seconds that it took.
        """
        ...


class FixedSpeculation:
    """Always asks one drafter for the same number of tokens (protocol `Speculation`); learns nothing.

    Args:
        drafter: by name.
        num_drafts: tokens for one sequence, as far as the drafter's limits and the step allow.
    """

    def __init__(self, drafter: str, num_drafts: int, limits: DrafterLimits) -> None:
        self._drafter = drafter
        self._num_drafts = min(num_drafts, limits.max_drafts)
        self._shape = limits.shape

    def choose(self, sequences: Sequence[Running], cost: StepCost, size: StepSize, num_left: int) -> list[Choice]:
        """Returns that many drafts for each sequence; the last ones go short where the step is full."""
        choices = []
        for _ in sequences:
            num = min(self._num_drafts, max(0, num_left))
            num_left -= num
            shape = None if self._shape is None else self._shape[:num]
            choices.append(Choice(self._drafter if num else "", num, shape, True))
        return choices

    def learn(self, sequence: Running, choice: Choice, sample: Sample) -> None:
        """Nothing to learn."""

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Nothing to learn."""
