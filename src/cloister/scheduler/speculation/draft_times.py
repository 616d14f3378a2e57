"""Cost model of drafter calls. Pure: no clock."""

from __future__ import annotations

from typing import Final

from cloister.scheduler.step_cost import StepCost, StepSize

STRIDE: Final = 16
"""After this many calls only every n-th is recorded: the fit takes longer than a drafter's search."""
NUM_UNSURE: Final = 3
MAX_RATIO: Final = 3.0
"""After this many calls, one that takes this multiple of the predicted time is an outlier."""
NUM_BELIEVED: Final = 5
"""After this many outliers in a row the model is reset to the shortest of them."""
_UNITS = StepSize(1e3, 1e6, 1e4)
"""Units of `StepCost` features, so that the fit does not depend on units."""


class DraftTimes:
    """Seconds of one drafter: per call, per draft in a row, per draft, and per sequence.

    A draft model runs once for each draft in a row, over all sequences; an n-gram search once for each sequence.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._num_calls = 0
        self._late_s: list[float] = []
        """Times of the outliers since the last normal call."""
        self.terms = (0.0, 0.0, 0.0, 0.0)

    @property
    def is_known(self) -> bool:
        """Whether a time was recorded."""
        return self._num_calls > 0

    def learn(self, num_sequences: int, num_drafts: int, elapsed_s: float, most_s: float) -> None:
        """Records the time of a call for the given numbers of drafts and sequences.

        Args:
            most_s: upper limit of early measurements: a first call may include initialisation or be an outlier.
        """
        self._num_calls += 1
        if num_sequences < 1:
            return
        depth = -(-num_drafts // num_sequences)
        if self._num_calls <= NUM_UNSURE:
            elapsed_s = min(elapsed_s, max(most_s, 1e-6))
        elif elapsed_s > MAX_RATIO * self.predict(num_sequences, num_drafts, depth):
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

    def lower(self, share: float) -> None:
        """Lowers an estimate that is so high that the drafter would never be called and measured again."""
        call, in_row, each, sequence = self.terms
        self.terms = (call * share, in_row * share, each * share, sequence * share)

    def predict(self, num_sequences: int, num_drafts: int, depth: int) -> float:
        """Returns the predicted seconds of one call with at most `depth` drafts in a row; 0 before the first measurement."""
        call, in_row, each, sequence = self.terms
        return call + in_row * depth + each * num_drafts + sequence * num_sequences
