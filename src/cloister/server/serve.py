"""Runs a server: binds, starts the engine, serves, and on SIGTERM drains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from cloister.engine.base import AsyncEngine
from cloister.server.connection import Connection
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError

LAST_WORDS_S: Final = 5.0
"""After the engine has ended every request, how long their last bytes may take to reach the clients."""
BACKLOG: Final = 2048
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Site:
    """A server that can be run: the application and the engine behind it, started."""

    app: ASGIApp
    engine: AsyncEngine


class Server(uvicorn.Server):
    """uvicorn with an engine to drain. Signals are `serve`'s, so that a drained server exits with 0."""

    def __init__(self, site: Site, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                site.app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + 2 * LAST_WORDS_S),
            )
        )
        self._engine = site.engine
        self._drain_timeout_s = config.drain_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, and lets the engine end what runs; replies go out meanwhile."""
        await asyncio.gather(super().shutdown(sockets), self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s + LAST_WORDS_S):
                await self._engine.drain(self._drain_timeout_s)


def serve(config: ServerConfig, start: Callable[[], Awaitable[Site]], announce: Callable[[str], None] = print) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code: 0 when everything ended in order.

    The port is taken first, so that a port in use is said before a model is loaded.

    Args:
        start: loads and starts everything; runs on the server's event loop.
        announce: told one line, the address, when requests are taken.

    Raises:
        ConfigError: the address cannot be used.
        CloisterError: the engine cannot start; nothing is left running.
    """
    with bind(config.host, config.port) as listener:
        return asyncio.run(_serve(config, start, announce, listener))


async def _serve(
    config: ServerConfig, start: Callable[[], Awaitable[Site]], announce: Callable[[str], None], listener: socket.socket
) -> int:
    stop = asyncio.Event()
    server: Server | None = None

    def ask_to_stop() -> None:
        if server is not None:
            server.force_exit = stop.is_set()  # the second signal does not wait
            server.should_exit = True
        stop.set()

    with _on_signals(ask_to_stop):
        site = await _start_unless(stop, start)
        if site is None:
            return 0
        server = Server(site, config)
        server.should_exit = stop.is_set()
        announce(f"Serving on {address_of(listener)}")
        await server.serve([listener])
    return 1 if server.force_exit else 0


async def _start_unless(stop: asyncio.Event, start: Callable[[], Awaitable[Site]]) -> Site | None:
    """Starts a site; None when the signal to stop came first."""
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.wait([starting])
        return None
    finally:
        stopping.cancel()


@contextlib.contextmanager
def _on_signals(callback: Callable[[], None]) -> Iterator[None]:
    """Calls back on SIGTERM and SIGINT; outside the main thread, where no signal arrives, does nothing."""
    loop = asyncio.get_running_loop()
    signals = _STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    for number in signals:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that holds the address and does not listen yet.

    Raises:
        ConfigError: there is no such address here, or it is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError("host is no address of this machine; try 127.0.0.1", param="host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or "unknown reason").lower()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another one with --port, or 0 for any", param="port"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a bound socket, with the port that was chosen."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
