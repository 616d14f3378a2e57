"""The engine in a thread: for `LLM`, and for programs with an event loop that want one process only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

from cloister.engine.base import EventListener, Health
from cloister.engine.core import EngineCore
from cloister.engine.desk import Desk
from cloister.engine.faults import describe
from cloister.engine.process import DRAINING, NOT_STARTED, STOP_GRACE_S
from cloister.engine.watchdog import Watchdog
from cloister.types.clock import WallClock
from cloister.types.config import EngineConfig
from cloister.types.events import Outputs, Shutdown
from cloister.types.request import Request, SequenceOutput

DIED: Final = "the engine stopped while it held this request, and in a thread it cannot be restarted; load it again"
PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.5

_logger = logging.getLogger(__name__)


class ThreadEngine:
    """An AsyncEngine in a thread of this process.

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
        self._desk.closed = NOT_STARTED
        self._watchdog = Watchdog(PATIENCE_S, PATIENCE_S)
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

    def subscribe(self, listener: EventListener) -> None:
        self._desk.subscribe(listener)

    def health(self) -> Health:
        return self._desk.health(self._watchdog)

    async def drain(self, timeout_s: float) -> None:
        if self._desk.closed == NOT_STARTED:
            return
        self._desk.closed = DRAINING
        self._core.inbox.put(Shutdown(timeout_s))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s + STOP_GRACE_S)
        self._watcher.cancel()
        self._desk.fail_all(DRAINING)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        post = partial(_post_to, loop, self._receive)
        try:
            self._core.run(post)
        except Exception as error:
            _logger.critical("the engine ends: %s", describe(error))
        finally:
            post(None)

    def _receive(self, message: Outputs | None) -> None:
        """Takes what the engine says; None is its end."""
        if message is not None:
            self._watchdog.advance()
            self._desk.deliver(message)
            return
        self._desk.closed = self._desk.closed or DIED
        self._desk.fail_all(self._desk.closed)
        self._ended.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            self._watchdog.look(self._clock.now(), is_waited_for=self._desk.num_in_flight > 0)


def _post_to(loop: asyncio.AbstractEventLoop, receive: Callable[[Outputs | None], None], message: Outputs | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed without a drain: nobody listens
        loop.call_soon_threadsafe(receive, message)
