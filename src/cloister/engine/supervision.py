"""Supervision of an engine: a watchdog that measures progress, a restart policy, and when it is idle.

Pure: all functions take `now`.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from cloister.types.events import Ended, Event, Stepped

MAX_TICK_S: Final = 1.0
"""Limit on the time that one watchdog check counts, so that a stall of the front itself does not replace the engine. Half of a
timeout that is shorter than two of them: an engine is seen to be stalled before it is replaced."""
NUM_STEPS: Final = 20
"""An engine may make no progress for this many of its own steps, however short the timeout."""
PING_AFTER_S: Final = 5.0
"""For engines of sealed nodes (`Supervision.ping_after_s`)."""
STACKS_SIGNAL: Final = signal.SIGUSR2
"""An engine process writes the stacks of its threads to its front. A sealed node ignores this signal."""
_STEP_DECAY: Final = 0.99


class Watchdog:
    """Measures for how long an engine with waiting requests has made no progress.

    Args:
        stall_timeout_s: the engine is stalled after this time without progress, and at least 20 of its longest recent steps.
        first_step_timeout_s: the same before its first step, which may compile kernels or read weights from the disk.

    Attributes:
        stalled_s: time without progress while requests waited.
    """

    def __init__(self, stall_timeout_s: float, first_step_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._first_step_timeout_s = first_step_timeout_s
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Resets for a new engine."""
        self.stalled_s = 0.0
        self._seen_s = now
        self._has_stepped = False
        self._step_s = 0.0

    def note(self, events: Iterable[Event]) -> None:
        """Counts steps and ends of requests as progress; a message without events is a heartbeat."""
        is_empty = True
        for event in events:
            is_empty = False
            if isinstance(event, Stepped):
                self._has_stepped = True
                self._step_s = max(event.elapsed_s, self._step_s * _STEP_DECAY)
                self.stalled_s = 0.0
            elif isinstance(event, Ended):
                self.stalled_s = 0.0
        if is_empty:
            self.stalled_s = 0.0

    def look(self, now: float, *, is_waited_for: bool) -> None:
        """Counts the time since the last check if requests wait for the engine."""
        if is_waited_for:
            self.stalled_s += min(now - self._seen_s, MAX_TICK_S, self._timeout_s / 2)
        else:
            self.stalled_s = 0.0
        self._seen_s = now

    @property
    def is_stalled(self) -> bool:
        """Whether requests have waited too long without progress: the engine is unhealthy."""
        return self.stalled_s >= self._timeout_s

    @property
    def is_hung(self) -> bool:
        """Whether it has been stalled for twice that time: it will not recover."""
        return self.stalled_s >= 2 * self._timeout_s

    @property
    def _timeout_s(self) -> float:
        return max(self._stall_timeout_s if self._has_stepped else self._first_step_timeout_s, NUM_STEPS * self._step_s)


class IdleTimer:
    """Measures for how long an engine has had nothing to do.

    Args:
        timeout_s: after this time it is idle; None: never.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._used_s = 0.0

    def note_use(self, now: float) -> None:
        """Starts again: the engine has something to do, or will have until `now`."""
        self._used_s = max(self._used_s, now)

    def is_held(self, now: float) -> bool:
        """Whether the engine is about to have something to do."""
        return now < self._used_s

    def is_over(self, now: float) -> bool:
        """Whether the engine has been idle for the whole time."""
        return self._timeout_s is not None and now - self._used_s >= self._timeout_s


class LivenessProbe:
    """Decides when to ping an engine that other processes use too: requests of workers may wait for an engine that hangs and
    has not reported them (`engine.sealed_channels`).

    Args:
        after_s: time without a message of the engine; None: it is never pinged.

    Attributes:
        is_open: it was pinged, and has not answered.
    """

    def __init__(self, after_s: float | None) -> None:
        self.is_open = False
        self._after_s = after_s
        self._heard_s = 0.0

    def note(self, now: float) -> None:
        """The engine has sent something, or has just started."""
        self._heard_s, self.is_open = now, False

    def look(self, now: float) -> bool:
        """Returns whether to ping it now."""
        if self._after_s is None or self.is_open or now - self._heard_s < self._after_s:
            return False
        self.is_open = True
        return True


class Restarts:
    """Exponential backoff with a limit.

    Args:
        max_restarts: most restarts within `window_s`.
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
        """Counts a restart and returns the pause before it, or None if there were too many."""
        while self._times_s and self._times_s[0] <= now - self.window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self.max_restarts:
            return None
        self._times_s.append(now)
        return min(self._max_backoff_s, self._backoff_s * 2.0 ** (len(self._times_s) - 1))


@dataclass(frozen=True, slots=True)
class Supervision:
    """Supervision settings of one engine.

    Attributes:
        start_timeout_s: timeout for loading the model.
        first_step_timeout_s: replaces the setting `stall_timeout_s` until the first step is done.
        look_every_s: interval of watchdog checks.
        restarts: its restart policy; None if it cannot be restarted.
        idle_timeout_s: an engine that can be restarted is ended when it had no request for this long, until there is one
            again; None keeps it.
        ping_after_s: an engine that others use too is pinged when it has been silent for this long; None: never.
        watches: False: another process watches the engine and starts the next one; this one opens a channel to it when there is
            a request.
    """

    start_timeout_s: float = 600.0
    first_step_timeout_s: float = 30.0
    look_every_s: float = 0.5
    restarts: Restarts | None = field(default_factory=Restarts)
    idle_timeout_s: float | None = None
    ping_after_s: float | None = None
    watches: bool = True
