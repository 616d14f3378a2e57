"""A bound on connections: who comes when all are taken is told so, and nobody who has one is disturbed."""

from __future__ import annotations

import contextlib
import resource
import socket
import time

import httpx
import pytest

from cloister.server import serve
from cloister.server.connection import Connection
from cloister.server.serve import RESERVED_FILES, fit_connections
from cloister.types.config import ServerConfig
from cloister.types.errors import ConfigError
from tests.server.running_server import MODEL, RunningServer, ScriptedEngine, endless, serving_script


@pytest.fixture
def narrow(model_path):
    config = ServerConfig(port=0, max_connections=2, drain_timeout_s=1.0)
    with serving_script(model_path, ScriptedEngine(endless), config=config) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=300)


def begin(connection: socket.socket) -> socket.socket:
    """Has a request in work that does not end: such a connection gives way to nobody."""
    body = b'{"model": "%s", "prompt": "x", "stream": true}' % MODEL.encode()
    fields = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d" % len(body)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + fields + b"\r\n\r\n" + body)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    return connection


def ask(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    said = b""
    while not said.endswith(b"}"):
        said += (part := connection.recv(65536))
        assert part
    return said


def test_who_comes_when_all_connections_are_taken_gets_503_and_the_others_go_on(narrow):
    with connect(narrow) as first, connect(narrow) as second:
        begin(first)
        begin(second)
        reply = httpx.get(f"{narrow.url}/health")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        assert reply.json()["error"]["code"] == "overloaded"
        assert first.recv(65536)
        assert second.recv(65536)
    deadline = time.monotonic() + 300
    while httpx.get(f"{narrow.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_refused_connections_take_nobodys_place(narrow, monkeypatch):
    monkeypatch.setattr("cloister.server.connection.LINGER_S", 600.0)
    with connect(narrow) as first:
        begin(first)
        with connect(narrow) as second:
            begin(second)
            refused = [connect(narrow) for _ in range(5)]
            assert all(connection.recv(65536).startswith(b"HTTP/1.1 503") for connection in refused)
        deadline = time.monotonic() + 300  # well before the refused ones are closed
        while httpx.get(f"{narrow.url}/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert first.recv(65536)
        for connection in refused:
            connection.close()


def test_an_unused_connection_stays_open_for_longer_than_clients_keep_theirs(narrow):
    assert narrow.uvicorn.config.timeout_keep_alive >= 2 * httpx.Limits().keepalive_expiry


def test_a_flood_of_refused_connections_is_closed_without_a_word(narrow, monkeypatch):
    monkeypatch.setattr("cloister.server.connection.MAX_LINGERING", 2)
    monkeypatch.setattr("cloister.server.connection.LINGER_S", 600.0)  # they still linger when the flood comes
    held = [begin(connect(narrow)) for _ in range(2)] + [connect(narrow) for _ in range(2)]
    assert [ask(connection)[:12] for connection in held[2:]] == [b"HTTP/1.1 503"] * 2
    with connect(narrow) as flood, contextlib.suppress(ConnectionResetError):
        assert flood.recv(10) == b""
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 300
    while httpx.get(f"{narrow.url}/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while Connection._num_lingering:  # the last ones that were refused have left, which the server is about to hear
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_bound_fits_the_files_that_a_process_may_open(monkeypatch, caplog):
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(serve.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(serve.resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert fit_connections(500) == 500
    assert limits["now"] == (1024, 4096)
    assert fit_connections(2048) == 2048
    assert limits["now"] == (2048 + RESERVED_FILES, 4096)
    assert fit_connections(10_000) == 4096 - RESERVED_FILES
    assert f"accepts {4096 - RESERVED_FILES} connections" in caplog.text
    limits["now"] = (1024, resource.RLIM_INFINITY)
    assert fit_connections(10_000) == 10_000
    limits["now"] = (100, 200)
    with pytest.raises(ConfigError, match="may open 200 files"):
        fit_connections(10)
