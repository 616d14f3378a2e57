"""Watchdog that ends a process whose event loop is blocked by a call that does not return."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from typing import Final

_LOOK_S: Final = 0.5


class LoopWatchdog(threading.Thread):
    """Prints the stacks of this process and ends it when `beat` has not run in its event loop for `patience_s`.

    Args:
        patience_s: time that does not include suspensions of the whole process.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__(name="event loop watchdog", daemon=True)
        self._patience_s = patience_s
        self._silent_s = 0.0

    async def beat(self) -> None:
        """Resets the timer periodically; runs until it is cancelled."""
        while True:
            self._silent_s = 0.0
            await asyncio.sleep(_LOOK_S)

    def run(self) -> None:
        while self._silent_s < self._patience_s:
            time.sleep(_LOOK_S)
            self._silent_s += _LOOK_S
        faulthandler.dump_traceback()
        os._exit(1)
