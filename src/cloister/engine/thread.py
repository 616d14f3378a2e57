"""The engine in a thread: for `LLM`, which blocks, and for programs with an event loop that want one process only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Final

from cloister.engine.base import EventListener, Health
from cloister.engine.core import EngineCore
from cloister.engine.desk import GRACE_S, Desk
from cloister.engine.faults import describe
from cloister.engine.process import DRAINING, STOP_GRACE_S
from cloister.engine.watchdog import Watchdog
from cloister.types.clock import WallClock
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError
from cloister.types.events import Outputs, Shutdown
from cloister.types.request import Request, SequenceOutput

DIED: Final = "the engine stopped while it held this request, and in a thread it cannot be restarted; load it again"
PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.5

_logger = logging.getLogger(__name__)

ProgressListener = Callable[[int, int], None]
"""Called with (requests that ended, requests in all)."""


class ThreadEngine:
    """An engine in a thread of this process. It is an AsyncEngine after `start`; without `start`, `generate_all` blocks.

    Args:
        core: the engine.
        config: `max_waiting` and `max_num_seqs` bound the queue.
    """

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self.model = core.model
        self.memory = core.memory
        self._core = core
        self._clock = WallClock()
        self._desk = Desk(core.inbox.put, self._clock, max_waiting=config.max_waiting, max_num_seqs=config.max_num_seqs)
        self._mailbox: queue.SimpleQueue[Outputs | None] = queue.SimpleQueue()
        self._post: Callable[[Outputs | None], None] = self._mailbox.put
        self._watchdog = Watchdog(PATIENCE_S, PATIENCE_S)
        self._batch = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cloister-engine", daemon=True)
        self._ended: asyncio.Event | None = None

    async def start(self) -> None:
        """Starts the engine; from now on it belongs to the running event loop."""
        loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._post = lambda message: _post_to(loop, self._receive, message)
        self._thread.start()
        self._watcher = asyncio.create_task(self._watch(), name="engine watchdog")

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        return self._desk.generate(request)

    def subscribe(self, listener: EventListener) -> None:
        self._desk.subscribe(listener)

    def health(self) -> Health:
        return self._desk.health(self._watchdog)

    async def drain(self, timeout_s: float) -> None:
        self._desk.closed = DRAINING
        self._core.inbox.put(Shutdown(timeout_s))
        if self._ended is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), timeout_s + STOP_GRACE_S)
            self._watcher.cancel()
        self._desk.fail_all(DRAINING)

    def generate_all(
        self, requests: Sequence[Request], on_progress: ProgressListener | None = None
    ) -> list[list[SequenceOutput]]:
        """Runs requests and blocks until all ended; returns the outputs of each, in order.

        Calls from several threads take turns. More requests than may wait are handed over as room appears.

        Raises:
            EngineError: the engine is not running, or an event loop owns it.
            InvalidRequestError: as `Desk.submit`.
        """
        if self._ended is not None:
            raise EngineError("this engine belongs to an event loop; use generate")
        with self._batch:
            if self._thread.ident is None:
                self._thread.start()
            batch = _Batch(requests, self._desk, on_progress)
            try:
                while batch.num_open:
                    batch.feed(self._clock.now())
                    with contextlib.suppress(queue.Empty):
                        self._receive(self._mailbox.get(timeout=_POLL_S))
            finally:
                batch.abandon()
        return batch.outputs

    def close(self, timeout_s: float = STOP_GRACE_S) -> None:
        """Aborts what runs and ends the thread; for engines that no event loop owns."""
        self._desk.closed = DRAINING
        self._core.inbox.put(Shutdown(0.0))
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._core.run(self._post)
        except Exception as error:
            _logger.critical("the engine ends: %s", describe(error))
        finally:
            self._post(None)

    def _receive(self, message: Outputs | None) -> None:
        """Takes what the engine says; None is its end."""
        if message is not None:
            self._watchdog.advance()
            self._desk.deliver(message)
            return
        self._desk.closed = self._desk.closed or DIED
        self._desk.fail_all(self._desk.closed)
        if self._ended is not None:
            self._ended.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            self._watchdog.look(self._clock.now(), is_waited_for=self._desk.num_in_flight > 0)


class _Batch:
    """Requests on their way through a desk, not more at once than it has room for."""

    def __init__(self, requests: Sequence[Request], desk: Desk, on_progress: ProgressListener | None) -> None:
        self.outputs: list[list[SequenceOutput]] = [[] for _ in requests]
        self.num_open = len(requests)
        self._requests = requests
        self._desk = desk
        self._on_progress = on_progress
        self._num_fed = 0
        self._num_open_sequences = [request.sampling.n for request in requests]
        self._deadlines_s: list[float] = []

    def feed(self, now: float) -> None:
        """Hands over as many requests as may wait, and ends those that should have ended long ago."""
        while self._num_fed < len(self._requests) and self._desk.has_room():
            request, number = self._requests[self._num_fed], self._num_fed
            self._desk.submit(request, partial(self._take, number))
            self._deadlines_s.append(now + request.timeout_s + GRACE_S)
            self._num_fed += 1
        for number, deadline_s in enumerate(self._deadlines_s):
            if deadline_s <= now and self._num_open_sequences[number]:
                self._desk.give_up(self._requests[number].request_id)

    def abandon(self) -> None:
        """Nobody waits any more: an interrupt, or an error."""
        for request in self._requests[: self._num_fed]:
            self._desk.abandon(request.request_id)

    def _take(self, number: int, output: SequenceOutput) -> None:
        self.outputs[number].append(output)
        if output.finish_reason is None:
            return
        self._num_open_sequences[number] -= 1
        if self._num_open_sequences[number] == 0:
            self.num_open -= 1
            if self._on_progress is not None:
                self._on_progress(len(self._requests) - self.num_open, len(self._requests))


def _post_to(loop: asyncio.AbstractEventLoop, receive: Callable[[Outputs | None], None], message: Outputs | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed without a drain: nobody listens
        loop.call_soon_threadsafe(receive, message)
