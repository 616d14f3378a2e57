"""Reads how long the engine's thread had a processor, and how long it waited for one (Linux).

A client cannot make a thread wait by what it asks for; other programs on its processor do. Source: `schedstat` of a task
(Documentation/scheduler/sched-stats.rst of the kernel): nanoseconds on a processor, nanoseconds on a run queue, time slices.
"""

from __future__ import annotations

import os
from math import inf
from typing import Final

_PATH: Final = "/proc/thread-self/schedstat"
_MAX_BYTES: Final = 128
INTERVAL_S: Final = 0.01
"""Time between two readings: each is a system call of 1.6 µs, and a step of a small model takes 200."""


class ThreadTimes:
    """The times of the thread that calls it first."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._is_known = True
        self._last = (0, 0)
        self._next_s = -inf

    def take(self, now: float) -> tuple[float, float]:
        """Returns the seconds since the last reading that the thread had a processor, and that it waited for one; zeros at the
        first reading, less than `INTERVAL_S` after one, and where the system does not say."""
        if now < self._next_s or not self._is_known:
            return 0.0, 0.0
        self._next_s = now + INTERVAL_S
        try:
            is_first = self._file is None
            if self._file is None:
                self._file = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
            processor_ns, starved_ns = (int(field) for field in os.pread(self._file, _MAX_BYTES, 0).split()[:2])
        except (OSError, ValueError):
            self._is_known = False
            return 0.0, 0.0
        last, self._last = self._last, (processor_ns, starved_ns)
        return (0.0, 0.0) if is_first else ((processor_ns - last[0]) / 1e9, (starved_ns - last[1]) / 1e9)
