"""Measures the part of a step that depends on how requests ask for their tokens to be chosen."""

from __future__ import annotations

from types import TracebackType

from cloister.types.clock import Clock


class SamplingTime:
    """Adds up the time inside `with` blocks of one step; a block inside another one counts once.

    Penalties, biases, log-probabilities and masks of grammars take their time in these blocks, the model's forward pass does
    not. So a client can make the rest of a step no longer by what it asks of sampling (`types.step.StepResult.sampling_s`).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._depth = 0
        self._since_s = self._sum_s = 0.0

    def begin(self) -> None:
        """Begins a step."""
        self._sum_s = 0.0

    @property
    def sum_s(self) -> float:
        """Seconds of this step so far."""
        return self._sum_s

    def __enter__(self) -> None:
        if not self._depth:
            self._since_s = self._clock.now()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self._sum_s += self._clock.now() - self._since_s
