"""How messages reach an engine: one in a process of its own, one in a thread, one that a worker has a channel to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from cloister.engine import channel
from cloister.engine.channel import MessageStream
from cloister.engine.supervision import Supervision
from cloister.engine.worker_channels import open_listener
from cloister.types import errors
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import Failed, FrontMessage, Outputs, Ready, Shutdown
from cloister.types.logs import describe
from cloister.types.processes import OVERWRITING, overwrites

if TYPE_CHECKING:
    from cloister.engine.core import EngineCore

LOST: Final = "the engine stopped while it held this request; send it again"
LOST_THREAD: Final = "the engine stopped while it held this request, and in a thread it cannot be restarted; load it again"
_BUFFER_BYTES: Final = 2**20
_EXIT_POLL_S: Final = 0.01

_logger = logging.getLogger(__name__)

Deliver = Callable[[Outputs], None]


class Transport(Protocol):
    """A way to one engine, used from one event loop.

    Attributes:
        ready: what the engine said of itself; None before it has.
        supervision: how the engine is watched; None: by somebody else.
        lost: the error of its requests when it is gone.
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
        """Passes a message on without waiting; one to an engine that is gone is lost, and `run` ends."""
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


class ProcessHandle(Protocol):
    """A process that somebody made for us, as subprocess.Popen shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[socket.socket], ProcessHandle]
"""Makes a process that runs `cloister.engine.engine_process` with the socket given as its own."""


def spawn_program(far: socket.socket, variables: Mapping[str, str] = {}) -> ProcessHandle:
    """Makes an engine process by executing the interpreter anew: no shell, no port, no name that another process could take.

    Args:
        variables: of its environment, beside those of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cloister.engine.engine_process", str(far.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        pass_fds=(far.fileno(),),
        process_group=0,  # Ctrl-C in a terminal reaches the front only
    )


class _ChannelTransport:
    """What a process and a worker's channel have in common: messages over a socket."""

    lost = LOST
    _messages: MessageStream | None = None

    async def run(self, deliver: Deliver) -> None:
        if self._messages is not None:
            while isinstance(message := await self._messages.receive(), Outputs):
                deliver(message)


class ProcessTransport(_ChannelTransport):
    """To an engine in a child process, which is replaced when it dies.

    Args:
        entry: "module:function" that takes the configuration in the child and returns its EngineCore.
        log_format: how the child writes its log.
        spawn: makes the child process; unset, by executing the interpreter, with memory that is overwritten when it is freed
            if the profile asks for that.
        keep_listener: gets the near end of the listener of each engine process (`engine.worker_channels`), to keep; None,
            engines have no listener.
    """

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
        self._process: ProcessHandle | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self, config: EngineConfig) -> None:
        begun_s, timeout_s = time.monotonic(), self._supervision.start_timeout_s
        async with contextlib.AsyncExitStack() as on_failure:
            near, far = open_listener() if self._keep_listener is not None else (None, None)
            if near is not None:
                on_failure.enter_context(near)
            await self._start(config, far)
            on_failure.push_async_callback(self.close)
            try:
                said = await asyncio.wait_for(self._await_ready(), timeout_s)
            except TimeoutError as error:
                raise EngineError(f"the engine was not ready after {timeout_s:.0f} s; the log may say why") from error
            on_failure.pop_all()
        if self._keep_listener is not None and near is not None:
            self._keep_listener(near)
        import_s = time.monotonic() - begun_s - sum(duration_s for _, duration_s in said.startup)
        self.ready = msgspec.structs.replace(said, startup=[("import", import_s), *said.startup])

    async def _start(self, config: EngineConfig, listener: socket.socket | None) -> None:
        """Makes the process and says what it shall become.

        Args:
            listener: through which others than this process send it channels (`engine.worker_channels`); it is closed here.
        """
        with contextlib.ExitStack() as unused:
            if listener is not None:
                unused.enter_context(listener)
            boot = channel.frame(channel.Boot(self._entry, config, [path for path in sys.path if path], self._log_format))
            spawn = self._spawn or partial(spawn_program, variables=OVERWRITING if overwrites(config.profile) else {})
            near, far = socket.socketpair()
            on_failure = unused.enter_context(contextlib.ExitStack())
            on_failure.enter_context(near)
            with far:
                process = spawn(far)
            on_failure.callback(process.kill)
            socket.send_fds(near, [boot], [] if listener is None else [listener.fileno()])
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            self._messages = await MessageStream.open(near)
            self._process = process
            on_failure.pop_all()

    async def _await_ready(self) -> Ready:
        assert self._messages is not None
        match await self._messages.receive():
            case Ready() as ready:
                return ready
            case Failed(message, code):
                raise _as_error(message, code)
            case _:
                raise EngineError("the engine died while it started; the log may say why")

    def send(self, message: FrontMessage) -> None:
        if self._messages is not None:
            self._messages.send(message)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def close(self) -> str | None:
        """Kills the process if it has not exited, and waits for it; it holds nothing that has to be saved."""
        process, messages = self._process, self._messages
        self._process = self._messages = None
        if process is None or messages is None:
            return None
        status = process.poll()
        messages.close()
        process.kill()
        await asyncio.sleep(0)  # the loop closes the socket at its next turn
        while status is None:  # SIGKILL ends any process; only the kernel takes its time
            await asyncio.sleep(_EXIT_POLL_S)
            status = process.poll()
        return f"the process ended with status {status}"


def _as_error(message: str, code: str) -> CloisterError:
    """Returns the error that the engine process raised, by its code."""
    kinds = (k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, CloisterError))
    kind = next((k for k in kinds if k.code == code and not issubclass(k, errors.RetryLaterError)), EngineError)
    return kind(message, code=code)


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


class WorkerTransport(_ChannelTransport):
    """To an engine behind a channel that somebody else opened (`engine.worker_channels`), for as long as one request takes.

    Args:
        ready: what the engine said of itself when it started.
    """

    pid = None
    supervision: Supervision | None = None  # the front watches the engine: it gets every step's event

    def __init__(self, ready: Ready) -> None:
        self.ready: Ready | None = ready
        self._sock: socket.socket | None = None

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

    def kill(self) -> None:
        pass

    async def close(self) -> str | None:
        if self._messages is not None:
            self._messages.close()
        return None
