"""Metrics of a sealed node for its operator: requests completed per minute and their durations, with noise."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from cloister.policy.counts import NoisyWindows

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S: Final = (1, 5, 20, 60)
"""Upper bounds of the histogram of durations, from a request's last byte to its response's last; one more cell counts the rest.
"""
_CELLS: Final = (*(f'outcome="answered",seconds="{bound}"' for bound in (*BOUNDS_S, "+Inf")), 'outcome="cut"')
_CUT: Final = len(_CELLS) - 1


class Figures:
    """Counts requests at the front, which sees sealed bytes only.

    Args:
        now: returns Unix seconds.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._windows = NoisyWindows(len(_CELLS))
        self._now = now

    def count(self, elapsed_s: float, *, answered: bool) -> None:
        """Counts a finished request.

        Args:
            answered: the whole response was sent; otherwise it was cut off, or the client disconnected.
        """
        self._windows.count(bisect_left(BOUNDS_S, elapsed_s) if answered else _CUT, self._now())

    def render(self, *, is_healthy: bool) -> bytes:
        """Returns the metrics in the Prometheus text format."""
        lines = [
            "# HELP cloister_engine_healthy 1 while steps advance or nothing waits.",
            "# TYPE cloister_engine_healthy gauge",
            f"cloister_engine_healthy {int(is_healthy)}",
        ]
        window = self._windows.last(self._now())
        if window is not None:
            lines += [
                "# HELP cloister_minute_requests Requests that ended in the last whole minute, with noise; not of few.",
                "# TYPE cloister_minute_requests gauge",
                *(f"cloister_minute_requests{{{cell}}} {count}" for cell, count in zip(_CELLS, window.counts, strict=True)),
                "# HELP cloister_minute_end_seconds Unix time at which that minute ended.",
                "# TYPE cloister_minute_end_seconds gauge",
                f"cloister_minute_end_seconds {window.end_s}",
            ]
        return "".join(f"{line}\n" for line in lines).encode()
