"""How messages reach an engine: one in a process of its own, one in a thread, one that a worker has a channel to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cloister.engine.channel import MessageStream
from cloister.engine.spawn import EngineProcess, Spawn, spawn_engine, spawn_overwriting, spawn_program
from cloister.engine.supervision import Supervision
from cloister.engine.worker_channels import open_listener
from cloister.types.config import EngineConfig
from cloister.types.events import FrontMessage, Outputs, Ready, Shutdown
from cloister.types.logs import describe
from cloister.types.processes import overwrites

if TYPE_CHECKING:
    from cloister.engine.core import EngineCore

LOST: Final = "the engine stopped while it held this request; send it again"
LOST_THREAD: Final = "the engine stopped while it held this request, and in a thread it cannot be restarted; load it again"

_logger = logging.getLogger(__name__)

Deliver = Callable[[Outputs], None]


class Transport(Protocol):
    """A way to one engine, used from one event loop.

    Attributes:
        ready: what the engine said of itself; None before it has.
        supervision: how the engine is watched; None: by somebody else.
        lost: what its requests are told when it is gone.
    """

    ready: Ready | None
    supervision: Supervision | None
    lost: str

    @property
    def pid(self) -> int | None:
        """The process of its own that the engine runs in at present."""
        ...

    async def open(self, config: EngineConfig) -> None:
        """Reaches an engine with these settings, and has it say what it is; again, after `close`, where it can be replaced.

        Raises:
            CloisterError: it cannot start; the message says why.
        """
        ...

    def send(self, message: FrontMessage) -> None:
        """Passes a message on without waiting; one to an engine that is gone is lost, as the end of `run` will tell."""
        ...

    async def run(self, deliver: Deliver) -> None:
        """Passes on what the engine says, until it is gone."""
        ...

    def kill(self) -> None:
        """Ends an engine that hangs, if it can be ended from here."""
        ...

    async def close(self) -> str | None:
        """Clears away what is left of an engine that is gone; returns how it ended, where that says more."""
        ...


class ProcessTransport:
    """To an engine in a child process, which is replaced when it dies.

    Args:
        entry: "module:function" that takes the configuration in the child and returns its EngineCore.
        log_format: how the child writes its log.
        spawn: makes the child process; unset, by executing the interpreter, with memory that is overwritten when it is freed
            if the profile asks for that.
        keep_listener: gets the near end of the listener of each engine process (`engine.worker_channels`), to keep; None,
            engines have no listener.
    """

    lost = LOST

    def __init__(
        self,
        entry: str,
        *,
        supervision: Supervision | None = None,
        log_format: str = "text",
        spawn: Spawn | None = None,
        keep_listener: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self.ready: Ready | None = None
        self._supervision = supervision or Supervision()
        self.supervision: Supervision | None = self._supervision
        self._entry = entry
        self._log_format = log_format
        self._spawn = spawn
        self._keep_listener = keep_listener
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self, config: EngineConfig) -> None:
        begun_s = time.monotonic()
        spawn = self._spawn or (spawn_overwriting if overwrites(config.profile) else spawn_program)
        timeout_s = self._supervision.start_timeout_s
        near, far = open_listener() if self._keep_listener is not None else (None, None)
        try:
            self._process = await spawn_engine(self._entry, config, timeout_s, self._log_format, spawn, far)
        except BaseException:
            if near is not None:
                near.close()
            raise
        if self._keep_listener is not None and near is not None:
            self._keep_listener(near)
        said = self._process.ready
        import_s = time.monotonic() - begun_s - sum(duration_s for _, duration_s in said.startup)
        self.ready = msgspec.structs.replace(said, startup=[("import", import_s), *said.startup])

    def send(self, message: FrontMessage) -> None:
        if self._process is not None:
            self._process.messages.send(message)

    async def run(self, deliver: Deliver) -> None:
        if self._process is not None:
            receive = self._process.messages.receive
            while isinstance(message := await receive(), Outputs):
                deliver(message)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def close(self) -> str | None:
        process, self._process = self._process, None
        return None if process is None else f"the process ended with status {await process.close()}"


class ThreadTransport:
    """To an engine in a thread of this process, which nothing can end from outside."""

    lost = LOST_THREAD
    pid = None

    def __init__(self, core: EngineCore) -> None:
        self.ready: Ready | None = Ready(core.model, core.memory, core.adapters.loaded, core.startup)
        self.supervision: Supervision | None = Supervision(restarts=None)
        self._core = core

    async def open(self, config: EngineConfig) -> None:
        pass

    def send(self, message: FrontMessage) -> None:
        self._core.input_queue.put(message)

    async def run(self, deliver: Deliver) -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        post = _Post(loop, lambda message: ended.set() if message is None else deliver(message))
        threading.Thread(target=self._work, args=(post.send,), name="cloister-engine", daemon=True).start()
        await ended.wait()

    def kill(self) -> None:
        pass

    async def close(self) -> str | None:
        return None

    def _work(self, emit: Callable[[Outputs | None], None]) -> None:
        try:
            self._core.run(emit)
        except Exception as error:
            _logger.critical("the engine ends: %s", describe(error))
        finally:
            emit(None)


class _Post:
    """Messages from the engine's thread to the event loop, which is woken once for all that came meanwhile; None is the end."""

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


class WorkerTransport:
    """To an engine behind a channel that somebody else opened (`engine.worker_channels`), for as long as one request takes.

    Args:
        ready: what the engine said of itself when it started.
    """

    lost = LOST
    pid = None
    supervision: Supervision | None = None  # the front's, which hears of every step

    def __init__(self, ready: Ready) -> None:
        self.ready: Ready | None = ready
        self._sock: socket.socket | None = None
        self._messages: MessageStream | None = None

    def attach(self, sock: socket.socket) -> None:
        """Takes the channel. Called once, before the client starts."""
        self._sock = sock

    async def open(self, config: EngineConfig) -> None:
        assert self._sock is not None, "attach the channel first"
        self._messages = await MessageStream.open(self._sock)

    def send(self, message: FrontMessage) -> None:
        if self._messages is None:
            return
        if isinstance(message, Shutdown):  # the engine is not this process's to end
            self._messages.close()
        else:
            self._messages.send(message)

    async def run(self, deliver: Deliver) -> None:
        if self._messages is not None:
            while isinstance(message := await self._messages.receive(), Outputs):
                deliver(message)

    def kill(self) -> None:
        pass

    async def close(self) -> str | None:
        if self._messages is not None:
            self._messages.close()
        return None
