"""The cores of a machine, shared by the runnable threads of engines, front and clients according to niceness."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from cloister.types.clock import Clock

_ROUNDING_S: Final = 1e-9
_WEIGHT_STEP: Final = 1.25
"""Linux gives a thread this many times the weight for each step of niceness that it has less (`sched_prio_to_weight`)."""


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


@dataclass(slots=True, eq=False)
class _Runs:
    """The runs of threads of one niceness, which are equally fast.

    Attributes:
        niceness, weight: of each.
        each_s: processor time that a thread got which has always been runnable.
        due: (`each_s` at its end, order of its beginning, its end) of each.
    """

    niceness: int
    weight: float
    each_s: float = 0.0
    due: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)


class Processors:
    """Cores that all runnable threads share by weight (generalised processor sharing, Parekh and Gallager 1993): each has one
    core at most, and where more are runnable than there are cores, they become slower. A scheduler with short time slices comes
    close to it.

    Args:
        num_cores: at least one.
        company: slowdown of a nice thread (an engine's) while others run too, as they share caches.
    """

    def __init__(self, num_cores: int, clock: Clock, company: float = 1.0) -> None:
        self._num_cores = num_cores
        self._company = company
        self._clock = clock
        self._since_s = clock.now()
        self._runs: dict[int, _Runs] = {}
        self._num_runs = 0
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work_s: float, niceness: int = 0) -> None:
        """Waits until the calling thread, with this niceness, has had `work_s` seconds of a core."""
        self._advance()
        self._num_runs += 1
        done = asyncio.get_running_loop().create_future()
        runs = self._runs.setdefault(niceness, _Runs(niceness, _WEIGHT_STEP**-niceness))
        heappush(runs.due, (runs.each_s + work_s, self._num_runs, done))
        self._plan()
        await done

    def _speeds(self) -> list[tuple[_Runs, float]]:
        """Returns how fast threads of each niceness run: at their share of a core (what those with a whole one leave is for
        others), less what company costs."""
        speeds = []
        has_company = sum(len(runs.due) for runs in self._runs.values()) > 1
        free = float(self._num_cores)
        left = sorted((runs for runs in self._runs.values() if runs.due), key=lambda runs: -runs.weight)
        while left:
            runs = left.pop(0)
            share = free * runs.weight / (len(runs.due) * runs.weight + sum(len(each.due) * each.weight for each in left))
            share = min(1.0, share)
            free -= len(runs.due) * share
            speeds.append((runs, share / self._company if has_company and runs.niceness else share))
        return speeds

    def _advance(self) -> None:
        now_s = self._clock.now()
        for runs, speed in self._speeds():
            runs.each_s += (now_s - self._since_s) * speed
        self._since_s = now_s

    def _plan(self) -> None:
        """Sets the timer to the end of the run that ends first, as things are."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits_s = [max(0.0, runs.due[0][0] - runs.each_s) / speed for runs, speed in self._speeds()]
        if waits_s:
            self._timer = asyncio.get_running_loop().call_later(min(waits_s), self._finish)

    def _finish(self) -> None:
        self._advance()
        for runs in self._runs.values():
            while runs.due and runs.due[0][0] <= runs.each_s + _ROUNDING_S:
                done = heappop(runs.due)[2]
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
