"""What an engine clears away when requests have ended: buffers of steps, garbage that refers to itself, and the stack.

Blocks of KV are wiped by the plan after the one that freed them, whoever else runs (`kv.pool`). This is for the rest, which no
owner can overwrite when it lets go of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

TIDY_EVERY_S: Final = 0.25
"""While other requests run, what ended ones left is cleared away so often."""


class MemoryScrubber:
    """Clears away; called between two steps.

    Args:
        wipe_buffers: overwrites what a back end's buffers hold, and the stacks of its threads.
    """

    def __init__(self, wipe_buffers: Callable[[], None]) -> None:
        self._wipe_buffers = wipe_buffers
        self._is_needed = False
        self._done_s = 0.0

    def freeze_gc_heap(self) -> None:
        """Excludes all objects that exist now from garbage collection, so that `tidy` is quick; call it when all is loaded."""
        gc.collect()
        gc.freeze()

    def note_end(self) -> None:
        """Says that a request ended."""
        self._is_needed = True

    def tidy(self, now: float, *, is_idle: bool) -> None:
        """Clears away, if a request ended since the last time; while others run, not at every step."""
        if not self._is_needed or (not is_idle and now - self._done_s < TIDY_EVERY_S):
            return
        gc.collect()
        self._wipe_buffers()
        self._is_needed = False
        self._done_s = now
