"""The engine in a process of its own, watched and replaced when it dies (rule 4: whatever happens, everybody gets a reply)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cloister.engine.adapter_calls import AdapterCalls
from cloister.engine.base import EventListener, Health
from cloister.engine.desk import Desk
from cloister.engine.faults import describe
from cloister.engine.launch import EngineChild, Spawn, launch, spawn_overwriting, spawn_program
from cloister.engine.restarts import Restarts
from cloister.engine.watchdog import Watchdog
from cloister.engine.worker_channels import open_listener
from cloister.types.clock import Clock, WallClock
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError
from cloister.types.events import Arrived, Ended, Event, FrontMessage, Outputs, Shutdown
from cloister.types.processes import overwrites
from cloister.types.request import ModelInfo, Request, SequenceOutput

NOT_STARTED: Final = "the engine has not been started"
DRAINING: Final = "the server is shutting down; send the request again to another one, or later"
RESTARTING: Final = "the engine is being restarted; send the request again in a few seconds"
DIED: Final = "the engine stopped while it held this request; send it again"
BROKEN: Final = "the engine died too often and is not restarted any more; the log says what it died of"
STOP_GRACE_S: Final = 5.0
"""How long past the drain's deadline the engine may take to exit by itself."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervision:
    """How an engine process is watched.

    Attributes:
        start_timeout_s: loading the model may take so long.
        first_step_timeout_s: stands for the setting `stall_timeout_s` until the first step of a process is done.
        look_every_s: how often the watchdog looks.
        restarts: how often and how soon it may be started again.
    """

    start_timeout_s: float = 600.0
    first_step_timeout_s: float = 30.0
    look_every_s: float = 0.5
    restarts: Restarts = field(default_factory=Restarts)


class ProcessEngine:
    """An AsyncEngine whose engine runs in a child process.

    Args:
        entry: "module:function" that takes the configuration in the child and returns its EngineCore.
        config: the engine's settings; `max_waiting` and `max_num_seqs` also bound the queue here; `stall_timeout_s` says when
            an engine that makes no step is unhealthy (it is replaced after twice that time).
        log_format: how the child writes its log.
        spawn: makes the child process; unset, by executing the interpreter, with memory that is overwritten when it is freed
            if the profile asks for that.
        keep_listener: gets the near end of the listener of each engine process (`engine.worker_channels`), to keep; None,
        engines have no listener.

    Attributes:
        model, memory: as the engine said; set by `start`.
        startup: what the engine said, after `import`: until its code was there.
    """

    model: ModelInfo
    memory: list[tuple[str, int]]
    startup: list[tuple[str, float]]

    def __init__(
        self,
        entry: str,
        config: EngineConfig,
        *,
        supervision: Supervision | None = None,
        clock: Clock | None = None,
        log_format: str = "text",
        spawn: Spawn | None = None,
        keep_listener: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._entry = entry
        self._spawn: Spawn = spawn or (spawn_overwriting if overwrites(config.profile) else spawn_program)
        self._config = config
        self._log_format = log_format
        self._supervision = supervision or Supervision()
        self._clock = clock or WallClock()
        self._watchdog = Watchdog(config.stall_timeout_s, self._supervision.first_step_timeout_s)
        self._desk = Desk(self._send, self._clock, max_waiting=config.max_waiting, max_num_seqs=config.max_num_seqs)
        self._desk.closed = NOT_STARTED
        self.adapters = AdapterCalls(self._send)
        self._child: EngineChild | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._drain_s: float | None = None
        self._is_broken = False
        self._keep_listener = keep_listener
        self._elsewhere: set[str] = set()

    async def start(self) -> None:
        """Starts the engine and waits until its model is loaded.

        Raises:
            CloisterError: it cannot start; the message says why.
        """
        await self._launch()
        self._keeper = asyncio.create_task(self._keep(), name="engine keeper")

    @property
    def pid(self) -> int | None:
        """The process that the engine runs in at present."""
        return self._child.pid if self._child is not None else None

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        return self._desk.generate(request)

    def subscribe(self, listener: EventListener) -> None:
        self._desk.subscribe(listener)

    def health(self) -> Health:
        return self._desk.health(self._watchdog)

    def fault(self) -> str | None:
        """Says why no engine will be started any more; None while one runs, or will."""
        return BROKEN if self._is_broken else None

    async def drain(self, timeout_s: float) -> None:
        self._desk.closed = DRAINING
        self._drain_s = timeout_s
        if self._keeper is None:
            return
        if self._child is None:
            self._keeper.cancel()  # it waits to start the engine again
        self._send(Shutdown(timeout_s))
        await asyncio.wait({self._keeper}, timeout=timeout_s + STOP_GRACE_S)
        self._keeper.cancel()
        await asyncio.wait({self._keeper}, timeout=STOP_GRACE_S)
        self._desk.fail_all(DRAINING)

    def _send(self, message: FrontMessage) -> None:
        if self._child is not None:
            self._child.send(message)

    async def _launch(self) -> None:
        config = replace(self._config, lora=self.adapters.as_setting(self._config.lora))
        begun_s = self._clock.now()
        near, far = open_listener() if self._keep_listener is not None else (None, None)
        timeout_s = self._supervision.start_timeout_s
        try:
            child = await launch(self._entry, config, timeout_s, self._log_format, self._spawn, far)
        except BaseException:
            if near is not None:
                near.close()
            raise
        if self._keep_listener is not None and near is not None:
            self._keep_listener(near)
        self._child = child
        self.model, self.memory = child.ready.model, child.ready.memory
        phases = child.ready.startup
        whole_s = self._clock.now() - begun_s
        self.startup = [("import", whole_s - sum(duration_s for _, duration_s in phases)), *phases]
        self.adapters.start(child.ready.adapters)
        self._watchdog.restart(self._clock.now())
        self._desk.closed = None if self._drain_s is None else DRAINING

    async def _keep(self) -> None:
        """Lives as long as the engine shall: serves one process after the other."""
        try:
            while self._child is not None:
                await self._serve(self._child)
                await self._bury(self._child)
                if self._drain_s is None:
                    await self._replace()
        except Exception as error:
            _logger.critical("the engine's keeper failed: %s", describe(error))
        finally:
            if self._child is not None:
                self._child.kill()
                await self._bury(self._child)
            if self._drain_s is None:
                self._desk.closed, self._is_broken = BROKEN, True

    async def _serve(self, child: EngineChild) -> None:
        """Passes on what the engine says, until it is gone; kills it when it hangs."""
        watch = asyncio.create_task(self._watch(child), name="engine watchdog")
        try:
            while isinstance(message := await child.receive(), Outputs):
                self._watchdog.note(message.events)
                if self._keep_listener is not None:
                    self._note_elsewhere(message.events)
                self._desk.deliver(message)
                self.adapters.deliver(message.replies)
        finally:
            watch.cancel()

    async def _watch(self, child: EngineChild) -> None:
        while True:
            await asyncio.sleep(self._supervision.look_every_s)
            has_work = bool(self._desk.num_in_flight or self._elsewhere)
            self._watchdog.look(self._clock.now(), is_waited_for=has_work and not self.adapters.is_loading)
            if self._watchdog.is_hung:
                _logger.error("the engine made no step for %.1f s; it is replaced", self._watchdog.stalled_s)
                child.kill()
                return

    def _note_elsewhere(self, events: Sequence[Event]) -> None:
        """Counts requests that others wait for, so that an engine that hangs on one of theirs is found out."""
        for event in events:
            if isinstance(event, Arrived) and not self._desk.knows(event.request_id):
                self._elsewhere.add(event.request_id)
            elif isinstance(event, Ended) and event.last:
                self._elsewhere.discard(event.request_id)

    async def _bury(self, child: EngineChild) -> None:
        """Ends every request of an engine that is gone."""
        self._child = None
        self._elsewhere.clear()
        is_draining = self._drain_s is not None
        self._desk.closed = DRAINING if is_draining else RESTARTING
        status = await child.close()
        if not is_draining:
            _logger.error("the engine process ended with status %d; %d requests fail", status, self._desk.num_in_flight)
        self._desk.fail_all(DRAINING if is_draining else DIED)
        self.adapters.fail_all(DRAINING if is_draining else DIED)

    async def _replace(self) -> None:
        """Starts the engine again, or gives up for good."""
        restarts = self._supervision.restarts
        while self._child is None:
            delay_s = restarts.next_delay_s(self._clock.now())
            if delay_s is None:
                _logger.critical("%d restarts in %.0f s: %s", restarts.max_restarts, restarts.window_s, BROKEN)
                return
            await asyncio.sleep(delay_s)
            try:
                await self._launch()
            except CloisterError as error:
                _logger.error("the engine did not start again: %s", error.message)
