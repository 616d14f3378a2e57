"""What it costs to ask a drafter. Pure: no clock."""

from __future__ import annotations

from typing import Final

from cloister.scheduler.budget import StepCost, StepSize

STRIDE: Final = 16
"""After so many calls every so many are taken in: the fit takes longer than a drafter's search."""
NUM_UNSURE: Final = 3
MOST_RATIO: Final = 3.0
"""After so many calls, one that takes so many times what is predicted was held up."""
NUM_BELIEVED: Final = 5
"""So many of those in a row are believed, the shortest of them, and all that was learned is forgotten."""
_UNITS = StepSize(1e3, 1e6, 1e4)
"""What `StepCost` counts as one, so that nothing explains a time better only because of its unit."""


class DraftTimes:
    """Seconds of one drafter: for each call, each draft in a row, each draft, and each sequence.

    A draft model runs once for each draft in a row, over all sequences; an n-gram search once for each sequence.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._num_calls = 0
        self._late_s: list[float] = []
        """Of the calls that took too long, since the last one that did not."""
        self.terms = (0.0, 0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """A time was taken in."""
        return self._num_calls > 0

    def learn(self, num_sequences: int, num_drafts: int, elapsed_s: float, most_s: float) -> None:
        """Takes in what it took to ask for so many drafts, for so many sequences together.

        Args:
            most_s: what is believed at most while little is known: a first call may prepare things, or be held up.
        """
        self._num_calls += 1
        if num_sequences < 1:
            return
        depth = -(-num_drafts // num_sequences)
        if self._num_calls <= NUM_UNSURE:
            elapsed_s = min(elapsed_s, max(most_s, 1e-6))
        elif elapsed_s > MOST_RATIO * self.predict(num_sequences, num_drafts, depth):
            self._late_s.append(elapsed_s)
            if len(self._late_s) < NUM_BELIEVED:
                return
            elapsed_s, self._cost, self._num_calls = min(self._late_s), StepCost(), NUM_UNSURE
        self._late_s.clear()
        if self._num_calls > STRIDE and self._num_calls % STRIDE:
            return
        size = StepSize(_UNITS[0] * depth, _UNITS[1] * num_drafts, _UNITS[2] * num_sequences)
        self._cost.learn(size, elapsed_s)
        call, *others = self._cost.coefficients
        in_row, each, sequence = (value * unit for value, unit in zip(others, _UNITS, strict=True))
        self.terms = (call, in_row, each, sequence)

    def doubt(self, share: float) -> None:
        """Believes less of what was learned, which is so much that nobody would ask again and find out."""
        call, in_row, each, sequence = self.terms
        self.terms = (call * share, in_row * share, each * share, sequence * share)

    def predict(self, num_sequences: int, num_drafts: int, depth: int) -> float:
        """Returns the seconds of one call, of `depth` drafts in a row at most; 0 before anything was learned."""
        call, in_row, each, sequence = self.terms
        return call + in_row * depth + each * num_drafts + sequence * num_sequences
