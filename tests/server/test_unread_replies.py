"""A reply that its client does not read is given up, however it was handed over, and counts for its key until it has left."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from cloister.policy import Credentials, KeyQuota
from cloister.server.connection import Connection
from cloister.server.serve import ServerApp
from cloister.types.config import ServerConfig
from tests.server.running_server import MODEL, RunningServer, ScriptedEngine, make_gate, running, says, serving_script
from tests.server.test_tls import config_for, trusting, write_pair

LENGTH = 12 * 2**20  # more than the kernels at both ends take
TIMEOUT_S = 0.5


class LongReplies:
    """Answers every request with a long reply, and notes which of them have ended.

    Args:
        num_pieces: in which the reply is handed over.
    """

    def __init__(self, num_pieces: int) -> None:
        self.num_pieces = num_pieces
        self.num_ended = 0

    async def drain(self, timeout_s: float) -> None:
        pass

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LENGTH)]})
        piece = bytes(LENGTH // self.num_pieces)
        for index in range(self.num_pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": index + 1 < self.num_pieces})
        self.num_ended += 1

    @contextlib.contextmanager
    def served(self, config: ServerConfig | None = None) -> Iterator[RunningServer]:
        @asynccontextmanager
        async def open_app():
            yield ServerApp(self, self)

        with running(open_app, config or ServerConfig(port=0, drain_timeout_s=1.0)) as server:
            yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", TIMEOUT_S)


def begin(server: RunningServer, head: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") -> socket.socket:
    """Sends a request and reads no more than the first bytes of its reply."""
    host, port = server.url.partition("://")[2].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(300)
    connection.connect((host, int(port)))
    if server.url.startswith("https"):
        connection = server.trust.wrap_socket(connection, server_hostname="localhost")
    connection.sendall(head)
    assert b"200" in connection.recv(15)
    return connection


def read_rest(connection: socket.socket) -> int:
    """Returns the bytes of a whole reply, or those that come before a reset."""
    num_bytes = 0
    with contextlib.suppress(ConnectionResetError):
        while num_bytes < LENGTH:
            if not (piece := connection.recv(2**20)):
                assert isinstance(connection, ssl.SSLSocket), "a reply that was cut looks like a whole one"
                break  # OpenSSL takes a reset for an end
            num_bytes += len(piece)
    return num_bytes


def wait_for(condition) -> None:
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("num_pieces", [1, 48])
def test_a_reply_that_nobody_reads_is_given_up(num_pieces, has_tls, tmp_path):
    app, config = LongReplies(num_pieces), None
    if has_tls:
        certfile, keyfile = write_pair(tmp_path)
        config = config_for(certfile, keyfile)
    with app.served(config) as server:
        if has_tls:
            server.trust = trusting(certfile)
        with begin(server) as connection:
            table = server.uvicorn.config.http_protocol_class.table
            wait_for(lambda: not table._networks)
            assert read_rest(connection) < LENGTH / 2
            assert app.num_ended == 1


@pytest.mark.parametrize("num_pieces", [1, 48])
def test_a_client_that_reads_slowly_gets_its_whole_reply(num_pieces, monkeypatch):
    timeout_s = 3.0  # a busy machine may stop this client, which would be one that does not read, for less than that
    monkeypatch.setattr(Connection, "unread_timeout_s", timeout_s)
    app = LongReplies(num_pieces)
    with app.served() as server, begin(server) as connection:
        num_bytes, until_s = 0, time.monotonic() + 1.5 * timeout_s
        while time.monotonic() < until_s:  # in steps far smaller than what the kernel waits for before it takes more
            num_bytes += len(connection.recv(4096))
            time.sleep(timeout_s / 60)
        assert app.num_ended == 0
        while num_bytes < LENGTH:
            piece = connection.recv(2**20)
            assert piece
            num_bytes += len(piece)
        wait_for(lambda: app.num_ended)


def test_a_connection_whose_client_reads_nothing_gives_way_to_a_new_one(monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 20.0)
    app = LongReplies(48)
    with (
        app.served(ServerConfig(port=0, max_connections=1, drain_timeout_s=1.0)) as server,
        begin(server) as first,
    ):
        table = server.uvicorn.config.http_protocol_class.table
        wait_for(lambda: table._waiting)
        with httpx.stream("GET", server.url) as reply:
            assert reply.status_code == 200
        assert read_rest(first) < LENGTH / 2


def test_an_unread_reply_counts_among_the_concurrent_requests_of_its_key(model_path, monkeypatch):
    monkeypatch.setattr(Connection, "unread_timeout_s", 60.0)
    credentials, key = Credentials.empty().add("ann", limits=KeyQuota(concurrent_requests=1))
    config = ServerConfig(port=0, api_keys="keys.json", drain_timeout_s=1.0)
    engine = ScriptedEngine(lambda request: says(["a" * LENGTH] if request.sampling.max_tokens == 9 else "a")(request))
    with serving_script(model_path, engine, gate=make_gate("team", credentials), config=config) as server:
        headers = {"authorization": f"Bearer {key}"}
        ask = lambda: httpx.post(f"{server.url}/v1/completions", headers=headers, json={"model": MODEL, "prompt": "x"})  # noqa: E731
        assert [ask().status_code for _ in range(3)] == [200] * 3
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 9}).encode()
        fields = (
            f"Host: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with begin(server, f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body) as connection:
            time.sleep(0.2)
            assert ask().status_code == 429
            assert read_rest(connection) >= LENGTH
            assert ask().status_code == 200
