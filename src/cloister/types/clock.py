"""Clocks as arguments: the wall clock, and one that tests set."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Zero has no meaning; differences do."""

    def now(self) -> float: ...


class WallClock:
    """The machine's monotonic clock; the same in every process of the machine."""

    def now(self) -> float:
        return time.monotonic()


class Stopwatch:
    """Times what is done one thing after the other.

    Attributes:
        laps: (what, seconds), in order.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.laps: list[tuple[str, float]] = []
        self._clock = clock or WallClock()
        self._since_s = self._clock.now()

    def lap(self, name: str) -> None:
        """Ends what went on since the last lap, or since the start, and calls it `name`."""
        now_s = self._clock.now()
        self.laps.append((name, now_s - self._since_s))
        self._since_s = now_s


class VirtualClock:
    """A clock that moves only when told to: tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock on by `seconds` >= 0."""
        if seconds < 0:
            raise ValueError("a clock cannot go back")
        self._now_s += seconds
