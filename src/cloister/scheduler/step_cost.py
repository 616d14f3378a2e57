"""Cost model of a step, fitted to measured steps (Sarathi-Serve, Agrawal et al. 2024, section 4.3). Pure: no clock.

cost = a + b * tokens + c * attended + d * read. `attended` is the sum over computed positions of the keys that each attends to
(arithmetic), `read` the sum over sequences of the keys that each loads once (memory traffic). The model learns from counts and
times only, never from content.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FORGETTING = 0.995
"""Weight of the past at each step of the fit: about 200 steps are remembered."""
_SCALE = (1.0, 1e3, 1e6, 1e4)  # scale of each feature, so that the fit is well conditioned
_FIRST_VARIANCE = 1e4
_MAX_TRACE = 1e6
_SIZE = range(4)


class StepSize(NamedTuple):
    """The size of a step, in counts."""

    num_tokens: float = 0.0
    num_attended: float = 0.0
    num_read: float = 0.0

    def plus_decodes(self, starts: Sequence[int]) -> StepSize:
        """Returns the size plus one position of each of these sequences."""
        num_tokens = len(starts)
        num_keys = sum(starts) + num_tokens
        return StepSize(self.num_tokens + num_tokens, self.num_attended + num_keys, self.num_read + num_keys)

    def plus(self, start: int, num_tokens: int) -> StepSize:
        """Returns the size plus positions [start, start + num_tokens) of one sequence."""
        return StepSize(
            self.num_tokens + num_tokens,
            self.num_attended + num_tokens * (start + (num_tokens + 1) / 2),
            self.num_read + start + num_tokens,
        )

    def minus(self, start: int, num_tokens: int) -> StepSize:
        """Returns the size without these positions."""
        return StepSize(
            self.num_tokens - num_tokens,
            self.num_attended - num_tokens * (start + (num_tokens + 1) / 2),
            self.num_read - start - num_tokens,
        )


class StepCost:
    """Predicts the time of a step; recursive least squares with forgetting (Haykin, Adaptive Filter Theory, ch. 13).

    Errors are relative to the step's time: a short decode step weighs as much as a long prefill step, because stalls are
    measured against the short ones. The covariance is kept as its square root (Potter's update; Bierman 1977, section II.2):
    rounding can then never make it indefinite, which the plain form became after some thousand steps.
    """

    def __init__(self) -> None:
        self._theta = [0.0 for _ in _SIZE]
        self._root = [[math.sqrt(_FIRST_VARIANCE) if i == j else 0.0 for j in _SIZE] for i in _SIZE]
        self._spread = 0.0
        self.num_learned = 0

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds (per step, per token, per key attended, per key read), all non-negative."""
        a, b, c, d = self._theta
        return a / _SCALE[0], b / _SCALE[1], c / _SCALE[2], d / _SCALE[3]

    def predict(self, size: StepSize) -> float:
        """Returns the predicted seconds of a step of this size; 0 before the first measurement."""
        a, b, c, d = self.coefficients
        return a + b * size.num_tokens + c * size.num_attended + d * size.num_read

    def learn(self, size: StepSize, elapsed_s: float) -> None:
        """Adds one measured step; steps of zero time are ignored. An outlier counts as slightly longer than predicted: it is
        caused by other programs on the machine, not by the model."""
        if elapsed_s <= 0.0:
            return
        x = [value / (unit * elapsed_s) for value, unit in zip((1.0, *size), _SCALE, strict=True)]
        root = self._root
        error = 1.0 - _dot(self._theta, x)
        f = [_dot(column, x) for column in zip(*root, strict=True)]
        novelty = _dot(f, f)
        # An outlier has full weight if few such steps were measured, and little weight if many were.
        doubt = math.sqrt(1.0 + novelty)
        if self.num_learned >= 10:
            bound = 4.0 * self._spread * doubt + 0.1
            error = min(max(error, -bound), bound)
        self._spread += (abs(error) / doubt - self._spread) / min(self.num_learned + 1, 50)
        # Similar steps carry no information about other directions; forgetting there would make the covariance grow without
        # limit.
        keep = FORGETTING if sum([_dot(row, row) for row in root]) < _MAX_TRACE else 1.0
        alpha = keep + novelty
        px = [_dot(row, f) for row in root]
        self._theta = [t + p / alpha * error for t, p in zip(self._theta, px, strict=True)]
        beta, scale = 1.0 / (alpha + math.sqrt(alpha * keep)), 1.0 / math.sqrt(keep)
        f0, f1, f2, f3 = f
        self._root = [
            [(a - beta * p * f0) * scale, (b - beta * p * f1) * scale, (c - beta * p * f2) * scale, (d - beta * p * f3) * scale]
            for (a, b, c, d), p in zip(root, px, strict=True)
        ]
        if min(self._theta) < 0.0:
            self._theta = _without_negatives(self._theta, self._root)
        self.num_learned += 1


def _without_negatives(theta: list[float], root: list[list[float]]) -> list[float]:
    """Returns the fit under the constraint that no coefficient is negative.

    Each negative coefficient is set to zero and the others are conditioned on that (the mean of a normal distribution given one
    of its variables). Clipping alone would leave the others too large, because they compensated for it.
    """
    theta, root = list(theta), list(root)
    for _ in _SIZE:
        value = min(theta)
        if value >= 0.0:
            break
        worst = theta.index(value)
        e, f, g, h = root[worst]
        square = max(e * e + f * f + g * g + h * h, 1e-300)
        for i, (a, b, c, d) in enumerate(root):  # unrolled, like `_dot`
            share = (a * e + b * f + c * g + d * h) / square
            theta[i] -= share * value
            root[i] = [a - share * e, b - share * f, c - share * g, d - share * h]
        theta[worst] = 0.0
    return [0.0 if value < 0.0 else value for value in theta]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    # unrolled: this runs a dozen times a step, and a loop would cost more than the arithmetic
    a, b, c, d = left
    e, f, g, h = right
    return a * e + b * f + c * g + d * h
