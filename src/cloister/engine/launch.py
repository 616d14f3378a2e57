"""Starting an engine process and talking to it: no shell, no port, no name that another process could take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from cloister.engine import channel
from cloister.types import errors
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import EngineMessage, Failed, FrontMessage, Ready
from cloister.types.processes import OVERWRITING

_BUFFER_BYTES = 2**20
_READ_LIMIT_BYTES = 2**20
_EXIT_POLL_S = 0.01


class ProcessHandle(Protocol):
    """A process that somebody made for us, as subprocess.Popen shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[socket.socket], ProcessHandle]
"""Makes a process that runs `cloister.engine.child` with the socket given as its own."""


class EngineChild:
    """An engine process that is ready, and the front's end of its socket pair.

    Attributes:
        ready: what it said of itself.
    """

    ready: Ready

    def __init__(self, process: ProcessHandle, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: FrontMessage) -> None:
        """Passes a message on without waiting; one to a dead engine is lost, as `receive` will tell.

        Raises:
            ChannelError: it is too long.
        """
        if not self._writer.is_closing():
            self._writer.write(channel.frame(message))

    async def receive(self) -> EngineMessage | None:
        """Returns the next message; None when the engine is gone or talks nonsense."""
        try:
            frame = await channel.receive(self._reader)
            return None if frame is None else channel.decode_engine(frame)
        except (channel.ChannelError, msgspec.MsgspecError):
            return None

    def kill(self) -> None:
        """Ends the process at once; it holds nothing that needs saying goodbye to."""
        self._process.kill()

    async def close(self, timeout_s: float = 0.0) -> int:
        """Waits for the process to exit, kills it after `timeout_s`, and returns its status (negative: a signal)."""
        give_up_s = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < give_up_s:
            await asyncio.sleep(_EXIT_POLL_S)
        self._writer.close()
        self._process.kill()
        while (status := self._process.poll()) is None:  # SIGKILL ends any process; only the kernel takes its time
            await asyncio.sleep(_EXIT_POLL_S)
        return status


def spawn_overwriting(far: socket.socket) -> ProcessHandle:
    """As `spawn_program`, of a process that overwrites what it frees."""
    return spawn_program(far, OVERWRITING)


def spawn_program(far: socket.socket, variables: Mapping[str, str] = {}) -> ProcessHandle:
    """Makes an engine process by executing the interpreter anew.

    Args:
        variables: of its environment, beside those of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cloister.engine.child", str(far.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        pass_fds=(far.fileno(),),
        process_group=0,  # Ctrl-C in a terminal reaches the front only
    )


async def launch(
    entry: str,
    config: EngineConfig,
    timeout_s: float,
    log_format: str = "text",
    spawn: Spawn = spawn_program,
    listener: socket.socket | None = None,
) -> EngineChild:
    """Starts an engine process and waits until its model is loaded.

    Args:
        entry: "module:function" that builds its EngineCore.
        log_format: how it writes its log.
        spawn: makes the process.
        listener: through which others than this process send it channels (`engine.worker_channels`); it is closed here.

    Raises:
        CloisterError: what the engine refused to start for.
        EngineError: it died while it started, or took longer than `timeout_s`.
    """
    boot = channel.frame(channel.Boot(entry, config, [path for path in sys.path if path], log_format))
    with contextlib.ExitStack() as unused:
        if listener is not None:
            unused.enter_context(listener)
        near, far = socket.socketpair()
        on_failure = unused.enter_context(contextlib.ExitStack())
        on_failure.enter_context(near)
        with far:
            process = spawn(far)
        on_failure.callback(process.kill)
        socket.send_fds(near, [boot], [] if listener is None else [listener.fileno()])
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        reader, writer = await asyncio.open_unix_connection(sock=near, limit=_READ_LIMIT_BYTES)
        on_failure.pop_all()
    child = EngineChild(process, reader, writer)
    try:
        child.ready = await asyncio.wait_for(_await_ready(child), timeout_s)
    except TimeoutError as error:
        await child.close()
        raise EngineError(f"the engine was not ready after {timeout_s:.0f} s; the log may say why") from error
    except BaseException:
        child.kill()
        await child.close()
        raise
    return child


async def _await_ready(child: EngineChild) -> Ready:
    match await child.receive():
        case Ready() as ready:
            return ready
        case Failed(message, code):
            raise _as_error(message, code)
        case _:
            raise EngineError("the engine died while it started; the log may say why")


def _as_error(message: str, code: str) -> CloisterError:
    """Returns the error that the engine process raised, by its code."""
    kinds = (k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, CloisterError))
    kind = next((k for k in kinds if k.code == code and k is not errors.QueueFullError), EngineError)
    return kind(message, code=code)
