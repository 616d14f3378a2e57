"""Overwrites residue of ended requests: step buffers, garbage in reference cycles, and the stack.

KV blocks are wiped by the plan after the one that freed them, even while other requests run (`kv.pool`). This module covers the
rest, which its owner cannot overwrite when releasing it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

from cloister.engine.machine import freeze_gc_heap

TIDY_EVERY_S: Final = 0.25
"""Interval between scrubs while other requests run."""


class MemoryScrubber:
    """Scrubs memory; called between two steps.

    Args:
        wipe_buffers: overwrites a back end's buffers and the stacks of its threads.
    """

    def __init__(self, wipe_buffers: Callable[[], None]) -> None:
        self._wipe_buffers = wipe_buffers
        self._is_needed = False
        self._done_s = 0.0

    def freeze_gc_heap(self) -> None:
        """Excludes all current objects from garbage collection, so that scrubbing is fast; call it once everything is
        loaded."""
        freeze_gc_heap()

    def note_end(self) -> None:
        """Notes that a request has ended."""
        self._is_needed = True

    def tidy(self, now: float, *, is_idle: bool) -> None:
        """Scrubs if a request has ended since the last time; while others run, not at every step."""
        if not self._is_needed or (not is_idle and now - self._done_s < TIDY_EVERY_S):
            return
        gc.collect()
        self._wipe_buffers()
        self._is_needed = False
        self._done_s = now
