"""What an operator may see of a sealed node's work: how many requests ended in a minute, and how long they took, with noise."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from cloister.policy.counts import NoisyWindows

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS_S: Final = (1, 5, 20, 60)
"""Upper bounds of what a request may have taken, from its last byte in to its last byte out; one more cell takes the rest."""
_CELLS: Final = (*(f'outcome="answered",seconds="{bound}"' for bound in (*BOUNDS_S, "+Inf")), 'outcome="cut"')
_CUT: Final = len(_CELLS) - 1


class Figures:
    """Counts requests as the front sees them: sealed bytes in, sealed bytes out.

    Args:
        windows: with a cell for each of `BOUNDS_S`, one for longer ones, and one for those that were cut off.
        now: Unix seconds.
    """

    def __init__(self, windows: NoisyWindows | None = None, now: Callable[[], float] = time.time) -> None:
        self._windows = windows or NoisyWindows(len(_CELLS))
        self._now = now

    def count(self, elapsed_s: float, *, answered: bool) -> None:
        """Counts a request that ended.

        Args:
            answered: all of an answer was sent; else it broke off, or whoever asked hung up.
        """
        self._windows.count(bisect_left(BOUNDS_S, elapsed_s) if answered else _CUT, self._now())

    def render(self, *, is_healthy: bool) -> bytes:
        """Returns the figures as Prometheus reads them."""
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
