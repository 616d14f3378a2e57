"""A virtual event loop with sockets: those of one machine are the kernel's own, TCP between machines is simulated.

What one end of a local socket sends is at the other end at once, so a run is the same each time: the loop asks the kernel what
is ready before it lets time pass, and always in the order in which it began to watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from cloister.cluster.virtual.event_loop import VirtualEventLoop
from cloister.private.virtual.tcp import TcpNetwork

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _PollingLoop(asyncio.SelectorEventLoop):
    """Watches descriptors in the order in which they came: `poll` lists them so, and `epoll` as they became ready."""

    def __init__(self) -> None:
        super().__init__(selectors.PollSelector())


class SocketEventLoop(VirtualEventLoop, _PollingLoop):
    """An event loop in virtual time. Nothing may wait for another process or another thread.

    Attributes:
        network: to which connections over TCP go; set before there are any.
        takes_s: returns how long work in a thread takes.
    """

    network: TcpNetwork

    def __init__(self) -> None:
        self.takes_s: Callable[[], float] = lambda: 0.0
        super().__init__()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Does work of a thread, in this one, when it would have been done."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.takes_s(), work)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **how: Any) -> Any:
        """As of asyncio; without a socket it connects over the simulated network."""
        sock = how.get("sock")
        if sock is None:
            sock = await self.network.connect((host, port))
        return await super().create_connection(protocol_factory, sock=sock)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connects a socket over the simulated network: its descriptor is then that of a connection there."""
        await self.network.connect(address, sock)

    async def sock_recv(self, sock: socket.socket, nbytes: int) -> bytes:
        data = await super().sock_recv(sock, nbytes)
        if not data:
            self.network.check_reset(sock)
        return data

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        num_bytes = await super().sock_recv_into(sock, buf)
        if not num_bytes:
            self.network.check_reset(sock)
        return num_bytes

    def _add_callback(self, handle: Any) -> None:
        self._due.append(handle)

    def _wait(self) -> None:
        """Lets time pass, unless the kernel has something."""
        self._process_events(self._selector.select(0))  # type: ignore[attr-defined]
        if not self._due:
            super()._wait()


@contextlib.contextmanager
def on_clock(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Has what another thread or process would do in one go look at the clock of an event loop."""
    real = time.monotonic
    time.monotonic = loop.time
    try:
        yield
    finally:
        time.monotonic = real
