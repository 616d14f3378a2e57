"""Runs one of the sealed programs until SIGTERM or SIGINT, with no line about any request."""

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
from cloister.server.serve import fit_connections
from cloister.server.tls import HandshakeQueue

MAX_CONNECTIONS = 2048
LAST_WORDS_S = 5
"""How long requests that run may go on once it is told to stop."""


class _Server(PacedServer):
    """uvicorn whose signals are ours, so that a program that was told to stop exits with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _is_about_program(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn is about the program: an answer that broke off is a request, at a time that tells something."""
    return not str(record.msg).startswith("ASGI callable returned without")


def run_program(app: ASGIApp, listener: socket.socket, *, tls_cert: Path | None = None, tls_key: Path | None = None) -> int:
    """Serves an application at a bound socket; returns the exit status, 1 if a second signal cut it short.

    Raises:
        ConfigError: this process may not open enough files.
    """
    config = program_config(app, tls_cert=tls_cert, tls_key=tls_key)
    logging.getLogger("uvicorn.error").addFilter(_is_about_program)
    server = _Server(config)
    with listener:
        asyncio.run(server.serve([listener]))
    return 1 if server.force_exit else 0


def program_config(app: ASGIApp, *, tls_cert: Path | None = None, tls_key: Path | None = None) -> uvicorn.Config:
    """Returns how a program serves: bounded connections, each wait with an end, no line about any request.

    Raises:
        ConfigError: as `run_program`.
    """

    class Bounded(Connection):
        table = ConnectionTable(fit_connections(MAX_CONNECTIONS, files_each=2))  # one of the client's, one to the next program

    config = uvicorn.Config(
        app,
        http=Bounded,
        log_config=None,
        access_log=False,  # lines with addresses beside times
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
