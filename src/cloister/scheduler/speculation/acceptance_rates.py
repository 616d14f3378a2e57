"""Acceptance rates of drafts, by their position in the drafter's order of confidence. Pure: counts only.

Every prefix of a draft is a tree, so k drafts yield 1 + sum of the first k rates expected tokens, whatever the shape. Counts
decay, so that the rates follow changes inside an answer (copying begins, code ends).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

DECAY: Final = 0.9
"""Decay of a position's counts each time it is drafted: about ten drafts are remembered."""
PRIOR_WEIGHT: Final = 2.0
"""Weight of the prior in drafts; it decays as they do."""


class AcceptanceRates:
    """Acceptance rates of one drafter, for one sequence or a whole engine.

    Args:
        prior: prior acceptance by position, non-increasing.
        decay: decay factor of the counts.
        proposed: prior probability that a draft reaches each length; None assumes the requested length.

    Attributes:
        proposed: by position: how often a draft reached this length when it was requested.
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
        """Adds one draft: its requested and actual size, and the accepted positions."""
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
        """Acceptance rate by position, non-increasing: expected tokens of each draft that is made."""
        if self._rates is None:
            self._rates = rates = []
            before = 1.0
            for num, count, weight, shape in zip(self._drafted, self._accepted, self._prior_weight, self._shape, strict=True):
                rate = (count + weight * before * shape) / (num + weight)
                before = rate if rate < before else before
                rates.append(before)
        return self._rates
