"""An event loop whose time stands still while anything can be done, and jumps to the next timer when nothing can.

So code that sleeps, waits for deadlines and keeps timers runs unchanged, without waiting, and twice the same.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from cloister.types.clock import VirtualClock

T = TypeVar("T")

STUCK = "everything waits, and no timer runs: nothing would ever happen again"
BUSY = "something runs again and again without any time passing"
MOST_TURNS = 20_000
"""Turns of the loop in one instant; after more, what runs will not stop."""


class _TimeSelector(selectors.BaseSelector):
    """Waits for no file: it lets the time of a wait pass at once."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._num_turns = 0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError(STUCK)
        self._num_turns += 1
        if timeout > 0:
            self._clock.advance(timeout)
            self._num_turns = 0
        elif self._num_turns > MOST_TURNS:
            self._num_turns = 0
            self._clock.advance(1.0)  # so that what runs can be cancelled
            raise RuntimeError(BUSY)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Nothing may wait for a file, a socket or another thread.

    Attributes:
        clock: its time.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self.clock = VirtualClock(start_s)
        super().__init__(_TimeSelector(self.clock))

    def time(self) -> float:
        return self.clock.now()


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a virtual event loop, and cancels what it leaves.

    Raises:
        RuntimeError: it waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualEventLoop) as runner:
        return runner.run(main)
