"""Measures the part of a step that depends on how requests ask for their tokens to be chosen."""

from __future__ import annotations

from types import TracebackType

from cloister.types.clock import Clock


class SamplingTime:
    """Adds up the time inside `with` blocks of one step; a block inside another one counts once.

    Penalties, biases, log-probabilities and masks of grammars take their time in these blocks, the model's forward pass does
    not. So a client can make the rest of a step no longer by what it asks of sampling (`types.step.StepResult.sampling_s`).

    Attributes:
        now: the clock's.
        sum_s: seconds of this step so far; set it to 0 when a step begins.
    """

    def __init__(self, clock: Clock) -> None:
        self.now = clock.now
        self._depth = 0
        self._since_s = self.sum_s = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._since_s = self.now()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if not self._depth:
            self.sum_s += self.now() - self._since_s
