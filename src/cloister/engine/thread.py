"""The engine in a thread: for `LLM`, and for programs with an event loop that want one process only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

from cloister.engine.adapter_calls import AdapterCalls
from cloister.engine.base import EventListener, Health
from cloister.engine.core import EngineCore
from cloister.engine.desk import Desk, Sink
from cloister.engine.faults import describe
from cloister.engine.process import DRAINING, NOT_STARTED, STOP_GRACE_S
from cloister.engine.watchdog import Watchdog
from cloister.types.clock import WallClock
from cloister.types.config import EngineConfig
from cloister.types.events import Outputs, Shutdown
from cloister.types.request import Request, SequenceOutput

DIED: Final = "the engine stopped while it held this request, and in a thread it cannot be restarted; load it again"
FIRST_STEP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.5

_logger = logging.getLogger(__name__)


class ThreadEngine:
    """An AsyncEngine in a thread of this process.

    Args:
        core: the engine.
        config: `max_waiting` and `max_num_seqs` bound the queue, `stall_timeout_s` says when it is unhealthy.
    """

    def __init__(self, core: EngineCore, config: EngineConfig) -> None:
        self.model = core.model
        self.memory = core.memory
        self.startup = core.startup
        self.adapters = AdapterCalls(core.input_queue.put)
        self.adapters.start(core.adapters.loaded)
        self._core = core
        self._clock = WallClock()
        self._desk = Desk(core.input_queue.put, self._clock, max_waiting=config.max_waiting, max_num_seqs=config.max_num_seqs)
        self._desk.closed = NOT_STARTED
        self._watchdog = Watchdog(config.stall_timeout_s, FIRST_STEP_TIMEOUT_S)
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Starts the engine; from now on it belongs to the running event loop."""
        loop = asyncio.get_running_loop()
        self._desk.closed = None
        thread = threading.Thread(target=self._run, args=(loop,), name="cloister-engine", daemon=True)
        thread.start()
        self._watcher = asyncio.create_task(self._watch(), name="engine watchdog")

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        return self._desk.generate(request)

    async def follow(self, request: Request, sink: Sink) -> None:
        """Submits a request, calls `sink` with every output on the event loop, and returns after the last one.

        What `sink` raises ends the request, and is raised here. Other errors as `generate`.
        """
        await self._desk.follow(request, sink)

    def subscribe(self, listener: EventListener) -> None:
        self._desk.subscribe(listener)

    def health(self) -> Health:
        return self._desk.health(self._watchdog)

    async def drain(self, timeout_s: float) -> None:
        if self._desk.closed == NOT_STARTED:
            return
        self._desk.closed = DRAINING
        self._core.input_queue.put(Shutdown(timeout_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s + STOP_GRACE_S)
        self._watcher.cancel()
        self._desk.fail_all(DRAINING)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        post = _Post(loop, self._receive)
        try:
            self._core.run(post.send)
        except Exception as error:
            _logger.critical("the engine ends: %s", describe(error))
        finally:
            post.send(None)

    def _receive(self, message: Outputs | None) -> None:
        """Takes what the engine says; None is its end."""
        if message is not None:
            self._watchdog.note(message.events)
            self._desk.deliver(message)
            self.adapters.deliver(message.replies)
            return
        self._desk.closed = self._desk.closed or DIED
        self._desk.fail_all(self._desk.closed)
        self.adapters.fail_all(self._desk.closed)
        self._ended.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            has_work = self._desk.num_in_flight > 0
            self._watchdog.look(self._clock.now(), is_waited_for=has_work and not self.adapters.is_loading)


class _Post:
    """Messages from the engine's thread to the event loop, which is woken once for all that came meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Outputs | None], None]) -> None:
        self._loop = loop
        self._receive = receive
        self._messages: deque[Outputs | None] = deque()
        self._is_coming = False

    def send(self, message: Outputs | None) -> None:
        """Called on the engine's thread."""
        self._messages.append(message)
        if not self._is_coming:
            self._is_coming = True
            with contextlib.suppress(RuntimeError):  # the loop was closed without a drain: nobody listens
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # in this order: a message that comes while these are read either is among them, or calls again
        self._is_coming = False
        try:
            while self._messages:
                self._receive(self._messages.popleft())
        finally:
            if self._messages:  # one could not be taken; the others still are
                self._loop.call_soon(self._deliver)
