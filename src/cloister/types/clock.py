"""Clocks as arguments: the monotonic clock, and a manual one for tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds. Only differences are meaningful."""

    def now(self) -> float: ...


class WallClock:
    """The system's monotonic clock; the same in every process of the machine."""

    def now(self) -> float:
        return time.monotonic()


class Stopwatch:
    """Measures consecutive phases.

    Attributes:
        laps: (what, seconds), in order.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.laps: list[tuple[str, float]] = []
        self._clock = clock or WallClock()
        self._since_s = self._clock.now()

    def lap(self, name: str) -> None:
        """Ends the phase since the last lap or the start, and names it `name`."""
        now_s = self._clock.now()
        self.laps.append((name, now_s - self._since_s))
        self._since_s = now_s


class VirtualClock:
    """A clock that advances only on demand, for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advances the clock by `seconds` >= 0."""
        if seconds < 0:
            raise ValueError("a clock cannot go back")
        self._now_s += seconds
