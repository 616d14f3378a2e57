"""What it costs to ask a drafter. Pure: no clock."""

from __future__ import annotations

from cloister.scheduler.budget import StepCost, StepSize

NUM_FIRST = 16
"""Times that are all taken in; of those after them every `STRIDE`-th."""
STRIDE = 16
NUM_UNSURE = 3
MOST_RATIO = 3.0
"""Calls after which one that takes so many times what is predicted is not believed."""
NUM_BELIEVED = 5
"""Such calls in a row after which the shortest of them is believed, and all that was learned forgotten."""
_UNITS = StepSize(1e3, 1e6, 1e4)
"""What `StepCost` counts as one, so that nothing explains a time better only because of its unit."""


class DraftTimes:
    """Seconds of one drafter: for each call, each draft in a row, each draft, and each sequence.

    A draft model runs once for each draft in a row, over all sequences; an n-gram search once for each sequence.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._num_seen = 0
        self._num_over = 0
        self._over_s = 0.0
        self.terms = (0.0, 0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """A time was taken in."""
        return self._num_seen > 0

    def learn(self, num_sequences: int, num_drafts: int, depth: int, elapsed_s: float, most_s: float) -> None:
        """Takes in what it took to ask for so many drafts, for so many sequences together; `depth` for one at most.

        Args:
            most_s: what is believed at most while little is known: a first call may prepare things, or be held up.
        """
        self._num_seen += 1
        if num_sequences < 1:
            return
        is_sure = self._num_seen > NUM_UNSURE
        if is_sure and elapsed_s > MOST_RATIO * self.predict(num_sequences, num_drafts, depth):
            self._num_over += 1
            self._over_s = elapsed_s = min(elapsed_s, self._over_s) if self._num_over > 1 else elapsed_s
            if self._num_over < NUM_BELIEVED:
                return  # held up
            self._cost, self._num_seen, is_sure = StepCost(), NUM_UNSURE + 1, True  # it costs more now
        else:
            self._num_over = 0
        if self._num_seen > NUM_FIRST and self._num_seen % STRIDE:
            return
        if not is_sure:
            elapsed_s = min(elapsed_s, max(most_s, 1e-6))
        self._cost.learn(StepSize(_UNITS[0] * depth, _UNITS[1] * num_drafts, _UNITS[2] * num_sequences), elapsed_s)
        call, *others = self._cost.coefficients
        in_row, each, sequence = (value * unit for value, unit in zip(others, _UNITS, strict=True))
        self.terms = (call, in_row, each, sequence)

    def doubt(self, share: float) -> None:
        """Believes less of what was learned, which is so much that nobody would ask again and find out."""
        call, in_row, each, sequence = self.terms
        self.terms = (call * share, in_row * share, each * share, sequence * share)

    def predict(self, num_sequences: int, num_drafts: int, depth: int) -> float:
        """Returns the seconds of one call; 0 before anything was learned."""
        call, in_row, each, sequence = self.terms
        return call + in_row * depth + each * num_drafts + sequence * num_sequences
