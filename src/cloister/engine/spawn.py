"""Starting an engine process and talking to it: no shell, no port, no name that another process could take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

from cloister.engine import channel
from cloister.types import errors
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import Failed, Ready
from cloister.types.processes import OVERWRITING

_BUFFER_BYTES = 2**20
_EXIT_POLL_S = 0.01


class ProcessHandle(Protocol):
    """A process that somebody made for us, as subprocess.Popen shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[socket.socket], ProcessHandle]
"""Makes a process that runs `cloister.engine.engine_process` with the socket given as its own."""


class EngineProcess:
    """An engine process that is ready, and the front's end of its socket pair.

    Attributes:
        ready: what it said of itself.
        messages: to it and from it.
    """

    ready: Ready

    def __init__(self, process: ProcessHandle, messages: channel.MessageStream) -> None:
        self.messages = messages
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Ends the process at once; it holds nothing that needs saying goodbye to."""
        self._process.kill()

    async def close(self) -> int:
        """Kills the process if it has not exited, waits for it, and returns its status (negative: a signal)."""
        status = self._process.poll()
        self.messages.close()
        self._process.kill()
        await asyncio.sleep(0)  # the loop closes the socket at its next turn
        while status is None:  # SIGKILL ends any process; only the kernel takes its time
            await asyncio.sleep(_EXIT_POLL_S)
            status = self._process.poll()
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
        [sys.executable, "-P", "-m", "cloister.engine.engine_process", str(far.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **variables},
        pass_fds=(far.fileno(),),
        process_group=0,  # Ctrl-C in a terminal reaches the front only
    )


async def spawn_engine(
    entry: str,
    config: EngineConfig,
    timeout_s: float,
    log_format: str = "text",
    spawn: Spawn = spawn_program,
    listener: socket.socket | None = None,
) -> EngineProcess:
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
        messages = await channel.MessageStream.open(near)
        on_failure.pop_all()
    engine = EngineProcess(process, messages)
    try:
        engine.ready = await asyncio.wait_for(_await_ready(engine), timeout_s)
    except TimeoutError as error:
        await engine.close()
        raise EngineError(f"the engine was not ready after {timeout_s:.0f} s; the log may say why") from error
    except BaseException:
        engine.kill()
        await engine.close()
        raise
    return engine


async def _await_ready(engine: EngineProcess) -> Ready:
    match await engine.messages.receive():
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
