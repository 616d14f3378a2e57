"""The cores of a machine on which engines, their front and its clients compute: who is runnable shares them equally."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from cloister.types.clock import Clock

_ROUNDING_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """Processor time of the front and its clients, which are one thread.

    Attributes:
        request_s, message_s, token_s: for each request, each message of an engine, and each token in it.
    """

    request_s: float = 0.0
    message_s: float = 0.0
    token_s: float = 0.0


FREE: Final = FrontCosts()


class Processors:
    """Cores that all runnable threads share equally (processor sharing, Kleinrock 1967): each has one core at most, and where
    more are runnable than there are cores, all become slower. A scheduler with short time slices comes close to it.

    Args:
        num_cores: at least one.
    """

    def __init__(self, num_cores: int, clock: Clock) -> None:
        self._num_cores = num_cores
        self._clock = clock
        self._each_s = 0.0  # the processor time that a thread got which has always been runnable
        self._since_s = clock.now()
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        self._num_runs = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work_s: float) -> None:
        """Returns when the calling thread has had so many seconds of a core."""
        self._advance()
        self._num_runs += 1
        done = asyncio.get_running_loop().create_future()
        heappush(self._due, (self._each_s + work_s, self._num_runs, done))
        self._plan()
        await done

    @property
    def _speed(self) -> float:
        return min(1.0, self._num_cores / max(1, len(self._due)))

    def _advance(self) -> None:
        now_s = self._clock.now()
        self._each_s += (now_s - self._since_s) * self._speed
        self._since_s = now_s

    def _plan(self) -> None:
        """Sets the timer to the end of the run that ends first, as things are."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            wait_s = max(0.0, self._due[0][0] - self._each_s) / self._speed
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._due and self._due[0][0] <= self._each_s + _ROUNDING_S:
            done = heappop(self._due)[2]
            if not done.done():  # else its thread has ended
                done.set_result(None)
        self._plan()


class FrontThread:
    """The one thread of the front and its clients: its work is done in the order in which it comes.

    Args:
        processors: the cores that it shares with others; it may have one of them.
    """

    def __init__(self, processors: Processors, costs: FrontCosts) -> None:
        self.costs = costs
        self._processors = processors
        self._queue: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    def do(self, work_s: float) -> asyncio.Future[None]:
        """Adds work; the future is done when the work is, after all that was added before."""
        done = asyncio.get_running_loop().create_future()
        self._queue.append((work_s, done))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return done

    async def _work(self) -> None:
        while self._queue:
            work_s, done = self._queue.popleft()
            await self._processors.run(work_s)
            if not done.done():
                done.set_result(None)
