"""An event loop for code that only waits: its clock jumps to the next timer, so that tests of timers neither wait nor depend
on how busy the machine is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time; for work without threads and sockets, which take real time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s.

    Raises:
        RuntimeError: nothing is left to be waited for, and so the work would never end.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("the work waits for something that no timer brings")
            self.now_s += timeout
        return ready
