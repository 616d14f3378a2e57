"""The zygote: `python -m cloister.private.workers.zygote FD`. It loads everything once, and forks a worker for each request.

It has one thread and never holds content: it passes on descriptors (the front's exchange, channels to engines, a channel to the
key service) and reads none of them. A worker serves one exchange and exits, whatever the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from cloister.engine.kv_unit import CARRIED
from cloister.engine.machine import freeze_gc_heap
from cloister.engine.sealed_channels import CONNECT
from cloister.private.workers.channel_broker import ChannelBroker
from cloister.trust.hardening.landlock import confine_signals
from cloister.trust.shape import TrafficShape
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import CloisterError
from cloister.types.events import Ready
from cloister.types.logs import describe
from cloister.types.processes import count_threads, end_with_parent, name_process

MESSAGE_BYTES: Final = 1 << 20
ENGINE_LISTENER, CARRIER, KEY_SERVICE_LISTENER, WORK = b"e", b"c", b"s", b"w"
"""Commands to a zygote, each with a descriptor: the listener of a new engine, or of what carries channels to one of another
machine (`engine_listener`), the key service's, and an exchange to serve."""
TAKEN: Final = b"+"
"""The reply to `WORK`; a listener gets none."""
WAITING_WORKERS: Final = 64
"""Number of workers that may wait for the engine, in addition to those whose sequences run."""
LIFE_MARGIN_S: Final = 120
"""Grace period of a worker beyond the deadline of its request."""


class ZygoteBoot(msgspec.Struct, frozen=True):
    """The first message to a zygote: configuration of its workers.

    Attributes:
        entry: "module:function"; the function takes this and returns a Serving.
        ready: the engines' description of themselves.
        import_path: the front's `sys.path`.
    """

    entry: str
    engine: EngineConfig
    server: ServerConfig
    ready: Ready
    import_path: list[str]
    shape: TrafficShape | None = None


class ZygoteReady(msgspec.Struct, frozen=True):
    """Its reply: its number of threads, which must be one, or why it cannot start."""

    num_threads: int = 0
    error: str = ""


class Serving(Protocol):
    """The work of a worker, prepared before any request, so that everything is loaded."""

    async def warm_up(self) -> None:
        """Runs synthetic requests, to load what is loaded on first use."""

    def close(self) -> None:
        """Drops privileges of this process, and of all that it forks, that are no longer needed."""

    async def serve(self, front: socket.socket, broker: socket.socket, key_service: socket.socket) -> None:
        """Serves one exchange.

        Args:
            broker: from which it gets channels to engines (`channel_broker.ChannelSource`).
        """


Factory = Callable[[ZygoteBoot], Serving]


def engine_listener(index: int, *, is_carried: bool = False) -> bytes:
    """Returns the command that brings the listener of an engine, or of what carries channels to one of another machine."""
    return (CARRIER if is_carried else ENGINE_LISTENER) + str(index).encode()


class Zygote:
    """Forks workers.

    Args:
        control: receives the front's commands.
        life_s: a worker is killed after this time, in seconds.
    """

    def __init__(self, control: socket.socket, serving: Serving, life_s: float) -> None:
        self._control = control
        self._broker = ChannelBroker(self._engine_channel, control)
        self._serving = serving
        self._life_s = life_s
        self._listeners: dict[bytes, socket.socket] = {}

    def run(self) -> None:
        """Serves until the front closes the socket."""
        while True:
            self._broker.serve()
            message, descriptors, _, _ = socket.recv_fds(self._control, 16, 1)
            if not message:
                return
            for descriptor in descriptors:
                sock = socket.socket(fileno=descriptor)
                if message == WORK:
                    self._work(sock)
                    self._control.send(TAKEN)
                else:
                    self.keep_listener(message, sock)
            _reap()

    def keep_listener(self, command: bytes, listener: socket.socket) -> None:
        """Takes over what a command brings, in place of what the same one brought before."""
        if (old := self._listeners.pop(command, None)) is not None:
            old.close()
        self._listeners[command] = listener

    def _work(self, front: socket.socket) -> None:
        """Forks a worker. If the key service cannot be reached, none is forked and the front's exchange is closed."""
        with contextlib.ExitStack() as opened:
            opened.enter_context(front)
            try:
                key_service = opened.enter_context(self._channel(KEY_SERVICE_LISTENER, socket.SOCK_SEQPACKET))
                broker = opened.enter_context(self._broker.admit())
                if os.fork() == 0:
                    self._become_worker(front, broker, key_service)
            except (OSError, KeyError):
                return

    def _engine_channel(self, index: int) -> tuple[socket.socket, bytes]:
        """Returns a channel to an engine, and how it comes. Raises OSError or KeyError if it does not run."""
        carrier = engine_listener(index, is_carried=True)
        if carrier in self._listeners:
            return self._channel(carrier, socket.SOCK_STREAM), CARRIED
        return self._channel(engine_listener(index), socket.SOCK_STREAM), CONNECT

    def _channel(self, listener: bytes, kind: socket.SocketKind) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, kind)
        try:
            with far:
                # without waiting: an engine that reads nothing must not stop the workers of all others
                socket.send_fds(self._listeners[listener], [CONNECT], [far.fileno()], socket.MSG_DONTWAIT)
        except BaseException:
            near.close()
            raise
        return near

    def _become_worker(self, front: socket.socket, broker: socket.socket, key_service: socket.socket) -> None:
        """Serves one exchange and exits; never returns."""
        status = 1
        try:
            end_with_parent()
            name_process("worker")
            confine_signals()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._life_s)
            for sock in (self._control, *self._listeners.values()):
                sock.close()
            self._broker.close()  # with the end of another worker it could give that one channels that it reads
            asyncio.run(self._serving.serve(front, broker, key_service))
            status = 0
        except BaseException as error:
            os.write(2, f"a worker failed: {describe(error) if isinstance(error, Exception) else 'stopped'}\n".encode())
        finally:
            os._exit(status)


def main(descriptor: int) -> int:
    """Runs the zygote; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    name_process("zygote")
    control = socket.socket(fileno=descriptor)
    boot = msgspec.msgpack.decode(control.recv(MESSAGE_BYTES), type=ZygoteBoot)
    sys.path.extend(path for path in boot.import_path if path not in sys.path)
    try:
        module, _, name = boot.entry.partition(":")
        factory: Factory = getattr(importlib.import_module(module), name)
        serving = factory(boot)
        asyncio.run(serving.warm_up())
        serving.close()
    except CloisterError as error:
        control.send(msgspec.msgpack.encode(ZygoteReady(error=error.message)))
        return 1
    num_threads = count_threads()
    if num_threads != 1:
        control.send(msgspec.msgpack.encode(ZygoteReady(error=f"it has {num_threads} threads, and forks of it would hang")))
        return 1
    freeze_gc_heap()  # workers share these pages, so the garbage collector must not touch them
    control.send(msgspec.msgpack.encode(ZygoteReady(num_threads=num_threads)))
    Zygote(control, serving, boot.engine.request_timeout_s + LIFE_MARGIN_S).run()
    return 0


def _reap() -> None:
    """Reaps finished workers."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
