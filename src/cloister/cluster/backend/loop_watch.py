"""Ends a process whose event loop stands still: a call that blocks waits for a reply that never comes."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from typing import Final

_LOOK_S: Final = 0.5


class LoopWatch(threading.Thread):
    """Ends this process, and prints where it was, when `beat` has not run for a time in its event loop.

    Args:
        patience_s: that time. One in which the whole process was stopped does not count.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(name="event loop's watch", daemon=True)
        self._patience_s = patience_s
        self._silent_s = 0.0

    async def beat(self) -> None:
        """Says again and again that the loop turns. Never returns."""
        while True:
            self._silent_s = 0.0
            await asyncio.sleep(_LOOK_S)

    def run(self) -> None:
        while self._silent_s < self._patience_s:
            time.sleep(_LOOK_S)
            self._silent_s += _LOOK_S
        faulthandler.dump_traceback()
        os._exit(1)
