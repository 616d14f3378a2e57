"""How often an engine that died may be started again, and how soon. Pure: it takes `now`."""

from __future__ import annotations

from collections import deque


class Restarts:
    """Exponential backoff with a limit.

    Args:
        max_restarts: so many within `window_s`, then no more.
        backoff_s: pause before the first restart of a window; each further one doubles it, up to `max_backoff_s`.
    """

    def __init__(
        self, max_restarts: int = 5, window_s: float = 600.0, backoff_s: float = 0.1, max_backoff_s: float = 10.0
    ) -> None:
        self.max_restarts = max_restarts
        self.window_s = window_s
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._times_s: deque[float] = deque()

    def next_delay_s(self, now: float) -> float | None:
        """Counts a restart and returns the pause before it, or None if there were too many already."""
        while self._times_s and self._times_s[0] <= now - self.window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self.max_restarts:
            return None
        self._times_s.append(now)
        return min(self._max_backoff_s, self._backoff_s * 2.0 ** (len(self._times_s) - 1))
