"""Transports of messages to an engine: in a separate process, in a thread, or over a worker's channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from cloister.engine import channel, child_process
from cloister.engine.channel import MessageStream
from cloister.engine.child_process import ProcessHandle
from cloister.engine.fork_server import ForkServer
from cloister.engine.kv_pool import KVPool, PoolSeat
from cloister.engine.kv_unit import CarriedSocket, KVUnit, UnitSeat, relative_endpoint
from cloister.engine.sealed_channels import open_listener
from cloister.engine.spawning import spawn_program
from cloister.engine.stacks import read_step_stack
from cloister.engine.supervision import STACKS_SIGNAL, Restarts, Supervision
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError, recreate
from cloister.types.events import Failed, FrontMessage, KVSource, Outputs, PrefetchKV, Ready, Shutdown, Submit
from cloister.types.logs import describe
from cloister.types.processes import OVERWRITING, overwrites

if TYPE_CHECKING:
    from cloister.engine.core import EngineCore

LOST: Final = "the engine stopped while it held this request; send it again"
LOST_THREAD: Final = "the engine stopped while it held this request, and in a thread it cannot be restarted; load it again"
_BUFFER_BYTES: Final = 2**20
MAX_CHANNEL_PAUSE_S: Final = 1.0
"""Longest pause before a worker asks again for a channel to an engine that does not run."""
_STACKS_TIMEOUT_S: Final = 1.0
_STACKS_PAUSE_S: Final = 0.05
_MAX_STACKS_AGAIN: Final = 4

_logger = logging.getLogger(__name__)

Deliver = Callable[[Outputs], None]
LoadGuard = Callable[[], contextlib.AbstractAsyncContextManager[None]]


class Transport(Protocol):
    """A connection to one engine, used from one event loop.

    Attributes:
        ready: the engine's description of itself; None until it is received.
        supervision: supervision settings; None if it can neither be watched nor replaced.
        lost: the error for its requests when the engine has ended.
    """

    ready: Ready | None
    supervision: Supervision | None
    lost: str

    @property
    def pid(self) -> int | None:
        """The process id of the engine, if it runs in its own process."""
        ...

    async def open(self, config: EngineConfig) -> None:
        """Starts or connects to an engine with these settings, and waits for its description. May be called again after `close`
        if the engine can be replaced.

        Raises:
            CloisterError: the engine cannot start; the message says why.
        """
        ...

    def send(self, message: FrontMessage) -> None:
        """Sends a message without blocking. If the engine has ended, the message is lost and `run` returns."""
        ...

    async def run(self, deliver: Deliver) -> None:
        """Dispatches the engine's messages until it ends."""
        ...

    def kill(self) -> None:
        """Kills an engine that hangs, if this transport can."""
        ...

    async def close(self) -> str | None:
        """Cleans up after an engine that has ended; returns how it ended, if known."""
        ...

    async def discard_template(self, *, is_final: bool = False) -> None:
        """Releases what another engine would start from, if it need not stay: no engine will be started soon, or ever."""
        ...


@runtime_checkable
class StackSource(Protocol):
    """A transport that can ask its engine which code it is running."""

    async def collect_stacks(self) -> str:
        """Returns the stacks of the engine's threads as `faulthandler` writes them (`engine.stacks`); empty if it does not
        react within a second."""
        ...


Spawn = Callable[[socket.socket], ProcessHandle]
"""Starts a process that runs `cloister.engine.engine_process` with the given socket."""


class _ChannelTransport:
    """Common base of the process and worker-channel transports: messages over a socket."""

    lost = LOST
    _messages: MessageStream | None = None

    async def run(self, deliver: Deliver) -> None:
        if self._messages is not None:
            while isinstance(message := await self._messages.receive(), Outputs):
                deliver(message)


class ProcessTransport(_ChannelTransport):
    """Transport to an engine in a child process, which is replaced when it dies.

    Args:
        entry: "module:function" that takes the configuration in the child and returns its EngineCore.
        log_format: log format of the child.
        spawn: starts the child process. Default: executes the interpreter, with an allocator that overwrites freed memory if
            the profile requires it.
        kv_secret: shared by engines that exchange KV (`Boot.kv_secret`).
        kv_pool: memory that several engines share for KV; each engine process gets a seat.
        kv_unit: the engines of a sealed node that exchange KV, in place of `kv_secret`.
        replica: which of several replicas it is (`Boot.replica`).
        fork_server: starts the child process in place of `spawn`, as a fork of a template.
        keep_listener: called with the near end of the listener of each engine process (`engine.sealed_channels`) that is ready,
            and takes ownership of it, or raises an error, which ends the engine; None: engines have no listener.
        guard_load: entered before each engine process is started, and left when it is ready and before its listener is kept;
            raises an error if what it loads may be other files than before (`UnchangedFiles.guard_load`).
    """

    def __init__(
        self,
        entry: str,
        *,
        supervision: Supervision | None = None,
        log_format: str = "text",
        spawn: Spawn | None = None,
        fork_server: ForkServer | None = None,
        keep_listener: Callable[[socket.socket], None] | None = None,
        guard_load: LoadGuard = contextlib.nullcontext,
        kv_secret: bytes | None = None,
        kv_pool: KVPool | None = None,
        kv_unit: KVUnit | None = None,
        replica: int | None = None,
    ) -> None:
        self.ready: Ready | None = None
        self._supervision = supervision or Supervision()
        self.supervision: Supervision | None = self._supervision
        self._entry = entry
        self._log_format = log_format
        self._spawn = spawn
        self._fork_server = fork_server
        self._keep_listener = keep_listener
        self._guard_load = guard_load
        self._kv_secret = kv_secret
        self._kv_pool, self._kv_unit = kv_pool, kv_unit
        self._seat: PoolSeat | None = None
        self._replica = replica
        self._process: ProcessHandle | None = None
        self._stacks_fd: int | None = None
        self._has_left = False
        if fork_server is not None:
            fork_server.num_users += 1

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self, config: EngineConfig) -> None:
        begun_s, timeout_s = time.monotonic(), self._supervision.start_timeout_s
        async with contextlib.AsyncExitStack() as on_failure:
            async with self._guard_load():
                near, far = open_listener() if self._keep_listener is not None else (None, None)
                if near is not None:
                    on_failure.enter_context(near)
                await self._start(config, far)
                on_failure.push_async_callback(self.close)
                try:
                    said = await asyncio.wait_for(self._await_ready(), timeout_s)
                except TimeoutError as error:
                    raise EngineError(f"the engine was not ready after {timeout_s:.0f} s; the log may say why") from error
            if self._keep_listener is not None and near is not None:
                self._keep_listener(near)
            on_failure.pop_all()
        rest_s = time.monotonic() - begun_s - sum(duration_s for _, duration_s in said.startup)
        first = "import" if said.startup else "clone"  # a fork of a template that has forked before reports nothing else
        self.ready = msgspec.structs.replace(said, startup=[(first, rest_s), *said.startup])

    async def _start(self, config: EngineConfig, listener: socket.socket | None) -> None:
        """Starts the process and sends its boot message.

        Args:
            listener: through which other processes send it channels (`engine.sealed_channels`); it is closed here.
        """
        with contextlib.ExitStack() as unused:
            if listener is not None:
                unused.enter_context(listener)
            import_path = [path for path in sys.path if path]
            is_restart = self.ready is not None
            seat = None if self._kv_pool is None else self._kv_pool.take_seat()
            secret, unit_seat = self._kv_secret, None
            unit_ends: Sequence[socket.socket] = ()
            if self._kv_unit is not None:
                unit_seat = UnitSeat(self._replica or 0)
                secret, unit_ends = self._kv_unit.secret, self._kv_unit.admit(unit_seat.index)
                for end in unit_ends:
                    unused.enter_context(end)
            boot = channel.Boot(
                self._entry, config, import_path, self._log_format, secret, is_restart, self._replica, unit_seat, seat
            )
            near, far = socket.socketpair()
            on_failure = unused.enter_context(contextlib.ExitStack())
            if seat is not None and self._kv_pool is not None:
                on_failure.callback(self._kv_pool.free_seat, seat)
            on_failure.enter_context(near)
            with far:
                process = await self._make_process(far, boot)
            on_failure.callback(process.kill)
            stacks_fd, far_stacks_fd = os.pipe()
            on_failure.callback(os.close, stacks_fd)
            unused.callback(os.close, far_stacks_fd)
            for fd in (stacks_fd, far_stacks_fd):
                os.set_blocking(fd, False)  # an engine that hangs must not wait in its signal handler too
            descriptors = [far_stacks_fd, *([] if listener is None else [listener.fileno()])]
            descriptors += [end.fileno() for end in unit_ends]
            if seat is not None and self._kv_pool is not None:
                descriptors.append(self._kv_pool.fd)
            socket.send_fds(near, [channel.frame(boot)], descriptors)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            self._messages = await MessageStream.open(near)
            self._process, self._stacks_fd = process, stacks_fd
            self._seat = None if seat is None else msgspec.structs.replace(seat, secret=b"")  # the pool alone keeps it
            on_failure.pop_all()

    async def _make_process(self, far: socket.socket, boot: channel.Boot) -> ProcessHandle:
        if self._fork_server is not None:
            return await self._fork_server.start(far, boot)
        spawn = self._spawn or partial(spawn_program, variables=OVERWRITING if overwrites(boot.config.profile) else {})
        return spawn(far)

    async def _await_ready(self) -> Ready:
        assert self._messages is not None
        match await self._messages.receive():
            case Ready() as ready:
                return ready
            case Failed(message, code, fit):
                raise recreate(message, code, fit)
            case _:
                assert self._process is not None
                raise EngineError(await child_process.explain_death(self._process))

    def send(self, message: FrontMessage) -> None:
        if self._messages is not None:
            self._messages.send(message)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def collect_stacks(self) -> str:
        """Has the engine write the stacks of its threads, and returns them (`StackSource`).

        It writes them in many pieces, and nothing marks the end. Another process may delay it in between, so a text counts only
        if the next one has the same stack of its steps; an engine that moves is asked a few times.
        """
        text = await self._collect_stacks_once()
        for _ in range(_MAX_STACKS_AGAIN):
            again = await self._collect_stacks_once() if text else ""
            if read_step_stack(again) == read_step_stack(text):
                break
            text = again
        return text

    async def _collect_stacks_once(self) -> str:
        """As `collect_stacks`; the text may be cut."""
        process, fd = self._process, self._stacks_fd
        if process is None or fd is None or process.poll() is not None:
            return ""
        _read_available(fd)
        os.kill(process.pid, STACKS_SIGNAL)
        text, give_up_s = b"", time.monotonic() + _STACKS_TIMEOUT_S
        while time.monotonic() < give_up_s and self._stacks_fd == fd:
            await asyncio.sleep(_STACKS_PAUSE_S)
            more = _read_available(fd) if self._stacks_fd == fd else b""
            if text and not more:
                break
            text += more
        return text.decode(errors="replace")

    async def close(self) -> str | None:
        """Kills the process if it has not exited, and waits for it; it holds no state that must be saved."""
        process, messages = self._process, self._messages
        self._process = self._messages = None
        if self._stacks_fd is not None:
            os.close(self._stacks_fd)
            self._stacks_fd = None
        if process is None or messages is None:
            return None
        messages.close()
        try:
            status = await child_process.end(process)
        finally:
            await self._leave_pool()
        await asyncio.sleep(0)  # the loop closes the socket at its next turn
        return f"the process ended with status {status}"

    async def _leave_pool(self) -> None:
        """Has the part of an engine that has ended wiped."""
        seat, self._seat = self._seat, None
        if seat is not None and self._kv_pool is not None:
            await asyncio.to_thread(self._kv_pool.free_seat, seat)

    async def discard_template(self, *, is_final: bool = False) -> None:
        if self._fork_server is None:
            return
        if is_final and not self._has_left:
            self._has_left = True
            self._fork_server.num_users -= 1
        await self._fork_server.discard_template()


def _read_available(fd: int) -> bytes:
    """Reads what is in a pipe, without waiting."""
    pieces: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(fd, _BUFFER_BYTES):
            pieces.append(piece)
    return b"".join(pieces)


class ThreadTransport:
    """Transport to an engine in a thread of this process, which cannot be killed."""

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

    async def discard_template(self, *, is_final: bool = False) -> None:
        pass

    def _work(self, emit: Callable[[Outputs | None], None]) -> None:
        try:
            self._core.run(emit)
        except Exception as error:
            _logger.critical("the engine ends: %s", describe(error))
        finally:
            emit(None)


class _Post:
    """Messages from the engine's thread to the event loop, which is woken once for each batch; None marks the end."""

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
            with contextlib.suppress(RuntimeError):  # the loop was closed without a drain, so there is no receiver
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # order matters: a message that arrives during this read is either included or schedules another call
        self._is_coming = False
        try:
            while self._messages:
                self._receive(self._messages.popleft())
        finally:
            if self._messages:  # one message failed; the others are still handled
                self._loop.call_soon(self._deliver)


OpenChannel = Callable[[], Awaitable[socket.socket]]
"""Returns a channel to an engine, a `CarriedSocket` if it is on another machine; raises EngineError if it does not run."""


class SealedWorkerTransport(_ChannelTransport):
    """Transport to an engine over channels that another process opens (`engine.sealed_channels`), for one request.

    Args:
        ready: the engine's description of itself from its start.
        index: which engine of the unit it is.
        num_engines: of each machine of the unit.

    Attributes:
        is_carried: its last channel led to another machine, so the end of the channel says nothing about the engine.
    """

    pid = None
    is_carried = False

    def __init__(self, ready: Ready, index: int = 0, num_engines: int = 1) -> None:
        self.ready: Ready | None = ready
        self._index, self._num_engines = index, num_engines
        # the front watches the engine and gets every step's event; here only another channel is opened
        self.supervision: Supervision | None = Supervision(
            restarts=Restarts(10_000, 1e9, 0.05, MAX_CHANNEL_PAUSE_S), watches=False
        )
        self._open_channel: OpenChannel | None = None

    def attach(self, open_channel: OpenChannel) -> None:
        """Sets the source of channels. Called once, before the client starts."""
        self._open_channel = open_channel

    async def open(self, config: EngineConfig) -> None:
        if self._open_channel is None:
            raise EngineError(LOST)
        sock = await self._open_channel()
        self.is_carried = isinstance(sock, CarriedSocket)
        if isinstance(sock, CarriedSocket):
            from cloister.engine.carried_channel import SealedMessageStream  # only where other machines are

            self._messages = await SealedMessageStream.shake_hands(sock)
        else:
            self._messages = await MessageStream.open(sock)

    def send(self, message: FrontMessage) -> None:
        if self._messages is None:
            return
        if isinstance(message, Shutdown):  # this process does not own the engine
            self._messages.close()
            return
        if isinstance(message, Submit) and message.kv_source is not None:
            message = msgspec.structs.replace(message, kv_source=self._find(message.kv_source))
        elif isinstance(message, PrefetchKV):
            message = msgspec.structs.replace(message, source=self._find(message.source))
        self._messages.send(message)

    def _find(self, source: KVSource) -> KVSource:
        return KVSource(relative_endpoint(source.endpoint, self._index, self._num_engines))

    def kill(self) -> None:
        pass

    async def close(self) -> str | None:
        if self._messages is not None:
            self._messages.close()
            self._messages = None
        return None

    async def discard_template(self, *, is_final: bool = False) -> None:
        pass
