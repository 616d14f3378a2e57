"""How often drafts are accepted, by their place in the drafter's order of trust. Pure: counts only.

Every prefix of a draft is a tree, so a budget of k drafts brings 1 + sum of the first k rates expected tokens, whatever the
shape. Counts fade, so that a change inside an answer (copying begins, code ends) is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

PAST: Final = 0.9
"""Weight that a place's past keeps when it is drafted again: about ten drafts are remembered."""
DOUBT: Final = 2.0
"""Drafts that the prior counts as at first; it fades as they do."""


class Rates:
    """Acceptance of one drafter's drafts, for one sequence or for all of an engine.

    Args:
        prior: accepted part by place, before anything was seen; none above the one before it.
        past: weight that counts keep.
        found: how often a draft has that many tokens, before anything was seen; None expects all that is asked for.

    Attributes:
        num_asks: drafts that were asked for.
    """

    __slots__ = ("_accepted", "_doubt", "_drafted", "_found", "_gains", "_past", "_shape", "num_asks")

    def __init__(self, prior: Sequence[float], past: float = PAST, found: Sequence[float] | None = None) -> None:
        before = (1.0, *prior)
        self._shape = [rate / last if last > 0.0 else 0.0 for rate, last in zip(prior, before, strict=False)]
        self._past = past
        self._accepted = [0.0] * len(prior)
        self._drafted = [0.0] * len(prior)
        self._doubt = [DOUBT] * len(prior)
        self._found = [1.0] * len(prior) if found is None else list(found)
        self._gains: list[float] | None = None
        self.num_asks = 0

    def learn(self, num_asked: int, num_drafted: int, accepted: tuple[int, ...]) -> None:
        """Takes in one draft: its size as wanted and as made, and the places that were accepted."""
        past, drafted, counts, found, doubt = self._past, self._drafted, self._accepted, self._found, self._doubt
        self._gains = None
        self.num_asks += 1
        share = max(1.0 - past, 1.0 / (self.num_asks + 1))
        for place in range(num_drafted):
            drafted[place] = drafted[place] * past + 1.0
            counts[place] *= past
            doubt[place] *= past
            found[place] += (1.0 - found[place]) * share
        for place in range(num_drafted, num_asked):
            found[place] -= found[place] * share
        for place in accepted:
            counts[place] += 1.0

    def fade(self, most: float) -> None:
        """Lets the past count as `most` drafts at most, so that news is heard."""
        for place, num in enumerate(self._drafted):
            if num > most:
                self._drafted[place] = most
                self._accepted[place] *= most / num
        self._gains = None

    @property
    def gains(self) -> list[float]:
        """Accepted part by place, falling: what each draft brings where it is made."""
        if self._gains is None:
            self._gains = gains = []
            before = 1.0
            for num, count, doubt, shape in zip(self._drafted, self._accepted, self._doubt, self._shape, strict=True):
                rate = (count + doubt * before * shape) / (num + doubt)
                before = rate if rate < before else before
                gains.append(before)
        return self._gains

    @property
    def found(self) -> list[float]:
        """How often a draft had that many tokens when it was asked for them."""
        return self._found
