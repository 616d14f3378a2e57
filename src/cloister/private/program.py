"""Runs one of the sealed programs until SIGTERM or SIGINT. It logs no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from cloister.server.connection import ACCEPTS_AT_ONCE, Connection, PacedServer
from cloister.server.load_shedding import ConnectionTable
from cloister.server.serve import INTERRUPTED, fit_connections
from cloister.server.tls import HandshakeQueue
from cloister.server.unread_replies import UnreadReplies

MAX_CONNECTIONS = 2048
LAST_WORDS_S = 5
"""Grace period for running requests after a stop signal."""


class _Server(PacedServer):
    """uvicorn with our own signal handling, so that a program exits with 0 on a stop signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _is_about_program(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn concerns the program. A line about an interrupted response would reveal when a request ran."""
    return not str(record.msg).startswith("ASGI callable returned without")


def run_program(app: ASGIApp, listener: socket.socket, *, tls_cert: Path | None = None, tls_key: Path | None = None) -> int:
    """Serves an application on a bound socket. Returns the exit status: 130 if a second Ctrl-C ended it at once.

    Raises:
        ConfigError: this process may not open enough files.
    """
    config = program_config(app, tls_cert=tls_cert, tls_key=tls_key)
    logging.getLogger("uvicorn.error").addFilter(_is_about_program)
    server = _Server(config)
    with listener:
        asyncio.run(server.serve([listener]))
    return INTERRUPTED if server.force_exit else 0


def program_config(app: ASGIApp, *, tls_cert: Path | None = None, tls_key: Path | None = None) -> uvicorn.Config:
    """Returns the uvicorn configuration: bounded connections, a timeout on each wait, no logging of requests.

    Raises:
        ConfigError: as `run_program`.
    """

    class Bounded(Connection):
        table = ConnectionTable(fit_connections(MAX_CONNECTIONS, files_each=2))  # one from the client, one to the next program
        unread = UnreadReplies()

    config = uvicorn.Config(
        app,
        http=Bounded,
        log_config=None,
        access_log=False,  # they would log addresses and times
        server_header=False,
        backlog=ACCEPTS_AT_ONCE,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=LAST_WORDS_S,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    config.load()
    if config.ssl is not None:
        Bounded.handshakes, config.ssl = HandshakeQueue(config.ssl), None
    return config
