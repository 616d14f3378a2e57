"""Runs a server: binds, starts the engine, serves; SIGHUP reloads keys and certificates, SIGTERM drains."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import uvicorn
from starlette.types import ASGIApp

from cloister.server.connection import ACCEPTS_AT_ONCE, BACKLOG, Connection, PacedServer
from cloister.server.load_shedding import ConnectionTable
from cloister.server.reload import Reloader, WatchedFiles
from cloister.server.tls import Certificate, HandshakeQueue
from cloister.server.unread_replies import MIB, UnreadReplies
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError

LAST_WORDS_S: Final = 5.0
"""Grace period for the last bytes to reach clients, after the engine has ended every request."""
KEEP_ALIVE_S: Final = 15
"""How long an unused connection stays open: longer than the 5 s of httpx, which OpenAI's SDK uses.

A request that crosses the end of its connection fails.
"""
FAULT_POLL_S: Final = 0.5
RESERVED_FILES: Final = 256
"""File descriptors in addition to those of connections: the model's files, sockets to the engine, refused connections."""
INTERRUPTED: Final = 130
"""Exit status of a program that a second Ctrl-C ended at once."""
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)


class Drained(Protocol):
    """Something that is drained before the server ends."""

    async def drain(self, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerApp:
    """A server that can be run.

    Attributes:
        engine: the started engine of the application, or several that take turns.
        sources: files that are reloaded while it runs.
        close: called at the very end.
        fault: returns why requests can permanently no longer be answered; None while they can. Such a server exits, so that its
            supervisor starts another.
    """

    app: ASGIApp
    engine: Drained
    sources: tuple[WatchedFiles, ...] = ()
    close: Callable[[], None] = lambda: None
    fault: Callable[[], str | None] = lambda: None


class Server(PacedServer):
    """uvicorn with an engine to drain. `serve` handles signals, so that a drained server exits with 0."""

    def __init__(self, server_app: ServerApp, config: ServerConfig, certificate: Certificate | None = None) -> None:
        class Bounded(Connection):
            table = ConnectionTable(config.max_connections)
            unread = UnreadReplies(config.max_unread_mb * MIB)
            handshakes = HandshakeQueue(certificate.context) if certificate is not None else None

        super().__init__(
            uvicorn.Config(
                server_app.app,
                http=Bounded,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=ACCEPTS_AT_ONCE,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + 2 * LAST_WORDS_S),
            )
        )
        self.config.load()
        self._engine = server_app.engine
        self._drain_timeout_s = config.drain_timeout_s
        self._is_sealed = config.sealed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, and lets the engine finish running requests; replies are sent meanwhile."""
        self._log_wait(len(self.server_state.tasks))
        await asyncio.gather(super().shutdown(sockets), self._drain())

    def _log_wait(self, num_requests: int) -> None:
        if not num_requests and not self._is_sealed:
            return
        # a sealed node does not say whether a request ran
        what = "open requests" if self._is_sealed else f"{num_requests} request{'s' * (num_requests > 1)}"
        _logger.info("stopping: %s, up to %g s; Ctrl-C again ends it now", what, self._drain_timeout_s)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s + LAST_WORDS_S):
                await self._engine.drain(self._drain_timeout_s)


def serve(config: ServerConfig, start: Callable[[], Awaitable[ServerApp]], announce: Callable[[str], None] = print) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code: 0 after a clean shutdown, 1 if it cannot go on or a second
    SIGTERM ended it at once, 130 if a second SIGINT did.

    The port is bound first, so that a port in use is reported before a model is loaded.

    Args:
        start: loads and starts everything; runs on the server's event loop.
        announce: called with one line, the address, when requests are accepted.

    Raises:
        ConfigError: the address cannot be used.
        CloisterError: the engine cannot start; nothing is left running.
    """
    certificate = Certificate.of(config)
    config = replace(config, max_connections=fit_connections(config.max_connections))
    with bind(config.host, config.port) as listener:
        return asyncio.run(_serve(config, start, announce, listener, certificate))


async def _serve(
    config: ServerConfig,
    start: Callable[[], Awaitable[ServerApp]],
    announce: Callable[[str], None],
    listener: socket.socket,
    certificate: Certificate | None,
) -> int:
    stop = asyncio.Event()
    server: Server | None = None
    reloader = Reloader(())

    interrupted = False

    def ask_to_stop(number: int | None = None) -> None:
        nonlocal interrupted
        if server is not None:
            server.force_exit = stop.is_set()  # a second signal stops immediately
            interrupted = server.force_exit and number == signal.SIGINT
            server.should_exit = True
        stop.set()

    with _on_signals(ask_to_stop, lambda: reloader.reload()):
        server_app = await _start_unless(stop, start)
        if server_app is None:
            return 0
        server = Server(server_app, config, certificate)
        server.should_exit = stop.is_set()
        reloader = Reloader((*server_app.sources, *([certificate.source()] if certificate is not None else [])))
        announce(f"Serving on {address_of(listener, has_tls=certificate is not None)}")
        watching = (
            asyncio.create_task(reloader.watch(), name="watch over files"),
            asyncio.create_task(_watch_fault(server_app, ask_to_stop), name="watch over the server"),
        )
        try:
            await server.serve([listener])
        finally:
            is_broken = server_app.fault() is not None
            for task in watching:
                task.cancel()
            server_app.close()
    return INTERRUPTED if interrupted else 1 if server.force_exit or is_broken else 0


async def _watch_fault(server_app: ServerApp, stop: Callable[[], None]) -> None:
    while (fault := server_app.fault()) is None:
        await asyncio.sleep(FAULT_POLL_S)
    _logger.critical("the server ends: %s", fault)
    stop()


async def _start_unless(stop: asyncio.Event, start: Callable[[], Awaitable[ServerApp]]) -> ServerApp | None:
    """Starts the server; None if a stop signal came first."""
    starting = asyncio.ensure_future(start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)  # what kept it from starting no longer matters
        return None
    finally:
        stopping.cancel()


@contextlib.contextmanager
def _on_signals(stop: Callable[[int], None], reload: Callable[[], None]) -> Iterator[None]:
    """Registers callbacks for SIGTERM and SIGINT, and for SIGHUP; does nothing outside the main thread."""
    loop = asyncio.get_running_loop()
    callbacks: dict[int, Callable[[], None]] = {
        **{number: partial(stop, number) for number in _STOP_SIGNALS},
        signal.SIGHUP: reload,
    }
    signals = callbacks if threading.current_thread() is threading.main_thread() else {}
    for number, callback in signals.items():
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to the address and listens; no connection is accepted yet.

    Raises:
        ConfigError: there is no such address here, or it is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"host {host} is not an address of this machine; try 127.0.0.1", param="host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or "unknown reason").lower()
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = (
                "no network interface of this machine has this address; choose another one with --host (0.0.0.0 is all of them)"
            )
            raise ConfigError(f"cannot listen on {host}: {remedy}", param="host") from None
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another one with --port, or 0 for any",
            param="port",
        ) from None
    return listener


def fit_connections(num_connections: int, files_each: int = 1) -> int:
    """Raises this process's file limit for this number of connections, returns how many fit, and warns of fewer.

    Args:
        files_each: as of `raise_file_limit`.

    Raises:
        ConfigError: none fits.
    """
    room = raise_file_limit(num_connections, files_each)
    if room < num_connections:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        _logger.warning(
            "this process may open %d files, so it accepts %d connections; raise the limit for more (ulimit -n)", allowed, room
        )
    return room


def raise_file_limit(num_connections: int, files_each: int = 1) -> int:
    """Raises this process's file limit for this number of connections, and returns how many fit.

    Args:
        files_each: files per connection: 2 if each may need another connection to another program.

    Raises:
        ConfigError: none fits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections * files_each + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return num_connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    room = (allowed - RESERVED_FILES) // files_each
    if room < 1:
        raise ConfigError(f"this process may open {hard} files; a server needs more than {RESERVED_FILES} (ulimit -n)")
    return min(room, num_connections)


def address_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Returns the URL of a bound socket, with the port that was chosen."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
