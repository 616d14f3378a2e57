"""How often drafts are accepted, by their position in the drafter's order of confidence. Pure: counts only.

Every prefix of a draft is a tree, so k drafts bring 1 + sum of the first k rates expected tokens, whatever the shape. Counts
decay, so that a change inside an answer (copying begins, code ends) is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

DECAY: Final = 0.9
"""Weight that a position's past keeps when it is drafted again: about ten drafts are remembered."""
PRIOR_WEIGHT: Final = 2.0
"""Drafts that the prior counts as at first; it decays as they do."""


class AcceptanceRates:
    """Acceptance of one drafter's drafts, for one sequence or for all of an engine.

    Args:
        prior: acceptance by position, before anything was seen; none above the one before it.
        decay: weight that counts keep.
        proposed: how often a draft has that many tokens, before anything was seen; None expects all that is asked for.

    Attributes:
        proposed: by position: how often a draft was so long when it was asked to be.
    """

    __slots__ = ("_accepted", "_decay", "_drafted", "_num_asked", "_prior_weight", "_rates", "_shape", "proposed")

    def __init__(self, prior: Sequence[float], decay: float = DECAY, proposed: Sequence[float] | None = None) -> None:
        before = (1.0, *prior)
        self._shape = [rate / last if last > 0.0 else 0.0 for rate, last in zip(prior, before, strict=False)]
        self._decay = decay
        self._accepted = [0.0] * len(prior)
        self._drafted = [0.0] * len(prior)
        self._prior_weight = [PRIOR_WEIGHT] * len(prior)
        self._num_asked = 0
        self._rates: list[float] | None = None
        self.proposed = [1.0] * len(prior) if proposed is None else list(proposed)

    def learn(self, num_asked: int, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Takes in one draft: its size as wanted and as made, and the positions that were accepted."""
        decay, drafted, counts, proposed, weight = self._decay, self._drafted, self._accepted, self.proposed, self._prior_weight
        self._rates = None
        self._num_asked += 1
        share = max(1.0 - decay, 1.0 / (self._num_asked + 1))
        for position in range(num_drafted):
            drafted[position] = drafted[position] * decay + 1.0
            counts[position] *= decay
            weight[position] *= decay
            proposed[position] += (1.0 - proposed[position]) * share
        for position in range(num_drafted, num_asked):
            proposed[position] -= proposed[position] * share
        for position in accepted:
            counts[position] += 1.0

    @property
    def rates(self) -> list[float]:
        """Accepted part by position, falling: the tokens that each draft brings where it is made."""
        if self._rates is None:
            self._rates = rates = []
            before = 1.0
            for num, count, weight, shape in zip(self._drafted, self._accepted, self._prior_weight, self._shape, strict=True):
                rate = (count + weight * before * shape) / (num + weight)
                before = rate if rate < before else before
                rates.append(before)
        return self._rates
