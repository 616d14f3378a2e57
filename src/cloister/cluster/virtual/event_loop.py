"""An event loop whose time stands still while anything can be done, and jumps to the next timer when nothing can.

So code that sleeps, waits for deadlines and keeps timers runs unchanged, without waiting, and twice the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from heapq import heappop, heappush
from signal import SIGINT, default_int_handler, getsignal, signal
from typing import Any, Final, TypeVar, TypeVarTuple

from cloister.types.clock import VirtualClock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STUCK = "everything waits, and no timer runs: nothing would ever happen again"
BUSY = "something runs again and again without any time passing"
MAX_TURNS = 20_000
"""Turns of the loop in one instant; after more, what runs will not stop."""
_RESOLUTION_S: Final = 1e-9
"""Timers so close to each other run in one turn, as with the clock of a machine."""


class _Call(asyncio.TimerHandle):
    """A callback that is due. Of asyncio's handles it has the methods; what they keep for debugging costs half of a turn."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled, self._source_traceback = False, None

    def cancel(self) -> None:
        self._cancelled = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self._when}>"


class VirtualEventLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Nothing may wait for a file, a socket or another thread.

    Equal timers run in the order in which they were set.

    Attributes:
        clock: its time.
    """

    _stopping: bool

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._due: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._num_timers = 0
        self._num_turns = 0
        self._is_interrupted = False
        super().__init__()

    def time(self) -> float:
        return self.clock.now()

    def interrupt(self) -> None:
        """Has the next turn raise KeyboardInterrupt in its place; a signal handler may call it."""
        self._is_interrupted = True

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        call = _Call(0.0, callback, args, self, context)
        self._due.append(call)
        return call

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        call = _Call(when, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, call))
        return call

    def _run_once(self) -> None:
        """Runs what is due; if nothing is, lets time pass first. Overrides the one method of asyncio that waits."""
        if self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt
        timers, due = self._timers, self._due
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not (due or self._stopping):
            self._wait()
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
            self._num_turns = 0
            self.clock.advance(1.0)  # so that what runs can be cancelled
            raise RuntimeError(BUSY)
        end_s = self.clock.now() + _RESOLUTION_S
        while timers and timers[0][0] < end_s:
            due.append(heappop(timers)[2])
        for _ in range(len(due)):
            call = due.popleft()
            if not call._cancelled:
                call._run()

    def _wait(self) -> None:
        """Lets time pass until the next timer. Raises RuntimeError if there is none."""
        if not self._timers:
            raise RuntimeError(STUCK)
        wait_s = self._timers[0][0] - self.clock.now()
        if wait_s > 0:
            self.clock.advance(wait_s)
            self._num_turns = 0


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a virtual event loop, and cancels what it leaves.

    Ctrl-C ends it between two turns. `asyncio.Runner.run` would cancel the coroutine, and what is simulated may go on after
    that for as long as it likes; an interrupt that comes at any place may come in a finalizer, where Python ignores it.

    Raises:
        RuntimeError: it waits for something that cannot happen.
    """
    with asyncio.Runner(loop_factory=VirtualEventLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualEventLoop)
        with _interrupted_between_turns(loop):
            return loop.run_until_complete(main)


@contextmanager
def _interrupted_between_turns(loop: VirtualEventLoop) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or getsignal(SIGINT) is not default_int_handler:
        yield
        return
    signal(SIGINT, lambda *_: loop.interrupt())
    try:
        yield
    finally:
        signal(SIGINT, default_int_handler)
