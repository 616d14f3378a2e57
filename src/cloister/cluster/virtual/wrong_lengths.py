"""Length predictions that are wrong on purpose: only times may depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from cloister.cluster.lengths import LengthPredictor
from cloister.cluster.virtual.scenario import LengthError
from cloister.types.request import Request

DRAWS: Final[Mapping[LengthError, Callable[[random.Random], float]]] = {
    "none": lambda draw: 1.0,
    "noise": lambda draw: max(0.0, draw.gauss(1.0, 0.3)),
    "zero": lambda draw: 0.0,
    "hundredfold": lambda draw: 100.0,
    "either": lambda draw: draw.choice((0.0, 100.0)),
}


class WrongLengths:
    """A predictor whose predictions are multiplied by a factor of each request.

    Args:
        error: how the factors are drawn.
        draw: source of randomness.
    """

    def __init__(self, predictor: LengthPredictor, error: LengthError, draw: random.Random) -> None:
        self._predictor, self._error, self._draw = predictor, error, draw
        self._factors: dict[str, float] = {}

    def expect(self, request: Request, num_done: int = 0) -> float:
        """As `LengthPredictor.expect`."""
        return self._factor(request) * self._predictor.expect(request, num_done)

    def quantile(self, request: Request, share: float) -> float:
        """As `LengthPredictor.quantile`."""
        return self._factor(request) * self._predictor.quantile(request, share)

    def learn(self, request: Request, num_tokens: int, *, is_whole: bool) -> None:
        """As `LengthPredictor.learn`."""
        self._predictor.learn(request, num_tokens, is_whole=is_whole)

    def _factor(self, request: Request) -> float:
        if request.request_id not in self._factors:
            self._factors[request.request_id] = DRAWS[self._error](self._draw)
        return self._factors[request.request_id]
