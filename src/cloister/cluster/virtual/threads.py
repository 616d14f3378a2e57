"""Helper threads of a virtual engine, run in virtual time by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class VirtualJob(Future[T]):
    """A job of a helper thread. Waiting for its result runs it at once: no other thread could."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work = work

    def run(self) -> None:
        """Does the job, unless it is done or was cancelled."""
        if self.done() or not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(self._work())
        except Exception as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        self.run()
        return super().result(timeout)


class VirtualThread(Executor):
    """A thread that does one job after the other.

    Args:
        takes_s: draws how long a job takes; None: no time at all, and it needs no event loop.
    """

    def __init__(self, takes_s: Callable[[], float] | None = None) -> None:
        self._takes_s = takes_s
        self._free_s = 0.0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        job: VirtualJob[T] = VirtualJob(partial(fn, *args, **kwargs))
        if self._takes_s is None:
            job.run()
            return job
        loop = asyncio.get_running_loop()
        self._free_s = max(self._free_s, loop.time()) + self._takes_s()
        loop.call_at(self._free_s, job.run)
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: submitted jobs are still run."""


def at_once(_: str) -> VirtualThread:
    """Makes a thread that takes no time (`executor.grammar.Grammars`)."""
    return VirtualThread()
