"""Health means progress (rule 11): notices an engine that stands still while requests wait. Pure: it takes `now`."""

from __future__ import annotations

MAX_TICK_S = 1.0
"""Most that one look at the engine counts, so that a front which itself stood still does not blame the engine."""


class Watchdog:
    """Measures how long an engine has made no progress although it should.

    Args:
        patience_s: without progress for so long, it hangs.
        first_patience_s: the same before its first step, which may compile or load.
    """

    def __init__(self, patience_s: float, first_patience_s: float) -> None:
        self._patience_s = patience_s
        self._first_patience_s = first_patience_s
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """A new engine stands there."""
        self.stalled_s = 0.0
        self._seen_s = now
        self._has_stepped = False

    def advance(self) -> None:
        """The engine made progress."""
        self.stalled_s = 0.0
        self._has_stepped = True

    def look(self, now: float, *, is_waited_for: bool) -> None:
        """Counts the time since the last look, if somebody waits for the engine."""
        if is_waited_for:
            self.stalled_s += min(now - self._seen_s, MAX_TICK_S)
        else:
            self.stalled_s = 0.0
        self._seen_s = now

    @property
    def is_hung(self) -> bool:
        return self.stalled_s >= (self._patience_s if self._has_stepped else self._first_patience_s)
