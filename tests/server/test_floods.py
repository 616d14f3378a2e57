"""Floods that cost nothing: sockets that say nothing, or little by little, leave everybody else alone."""

from __future__ import annotations

import contextlib
import gc
import http.client
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloister.server.connection import Connection
from cloister.server.connection_table import ConnectionTable
from cloister.server.networks import network_of
from cloister.types.config import ServerConfig
from tests.server.house import House, ScriptedEngine, says, serving_script
from tests.server.test_tls import write_pair

LIMIT = 8
CROWD, NEIGHBOUR, HONEST = "127.1.1.1", "127.1.1.2", "127.2.2.2"
"""The first two are of one /24."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
def small(model_path: Path) -> Iterator[House]:
    config = ServerConfig(port=0, max_connections=LIMIT, drain_timeout_s=1.0)
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config) as house:
        yield house


def port_of(house: House) -> int:
    return int(house.url.rpartition(":")[2])


def connect(house: House, source: str, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port_of(house)), timeout=5, source_address=(source, 0))
    connection.sendall(data)
    return connection


def ask_health(house: House, source: str = HONEST) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(house), timeout=5, source_address=(source, 0))
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "data", [b"", b"POST / HTTP/1.1\r\nX-", HEAD + b"Content-Length: 100\r\n\r\n{"], ids=["idle", "head", "body"]
)
@pytest.mark.parametrize("source", [HONEST, CROWD], ids=["another network", "the same network"])
def test_sockets_without_a_whole_request_keep_nobody_out(small: House, data: bytes, source: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * LIMIT):
            stack.enter_context(connect(small, CROWD, data))
        assert [ask_health(small, source) for _ in range(5)] == [200] * 5


def test_the_crowd_gives_way_and_not_an_idle_connection_of_somebody_else(small: House) -> None:
    with connect(small, HONEST) as honest, contextlib.ExitStack() as stack:
        for source in (CROWD, NEIGHBOUR) * LIMIT:
            stack.enter_context(connect(small, source))
        honest.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert honest.recv(100).startswith(b"HTTP/1.1 200")


class Held:
    """A connection of no server, to see which one is shed."""

    def __init__(self) -> None:
        self.is_shed = False

    def shed(self) -> None:
        self.is_shed = True


def test_a_whole_request_is_never_given_up_for_a_new_connection() -> None:
    table, working = ConnectionTable(3), [Held() for _ in range(3)]
    for held in working:
        assert table.enter(held, CROWD)
        table.work(held)
    assert not table.enter(Held(), HONEST)
    table.wait(working[1])
    assert table.enter(Held(), HONEST)
    assert [held.is_shed for held in working] == [False, True, False]
    for held in working:
        table.leave(held)
    assert all(table.enter(Held(), CROWD) for _ in range(2))


def test_the_oldest_of_the_largest_network_gives_way_first() -> None:
    table = ConnectionTable(4)
    honest, old, young, third = (Held() for _ in range(4))
    for held, host in ((honest, HONEST), (old, CROWD), (young, NEIGHBOUR), (third, CROWD)):
        table.enter(held, host)
    table.wait(old)  # noted again: it keeps its place
    assert table.enter(Held(), "127.3.3.3")
    assert [held.is_shed for held in (honest, old, young, third)] == [False, True, False, False]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:7:ffff::1", "2001:db8:7::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        (None, ""),
        ("", ""),
    ],
)
def test_a_network_is_what_the_internet_routes_by_itself(host: str | None, network: str) -> None:
    assert network_of(host) == network


@pytest.fixture
def guarded(model_path: Path, tmp_path: Path) -> Iterator[House]:
    certfile, keyfile = write_pair(tmp_path)
    config = ServerConfig(port=0, max_connections=LIMIT, drain_timeout_s=1.0, certfile=str(certfile), keyfile=str(keyfile))
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config) as house:
        yield house


def test_handshakes_that_never_end_are_counted_as_connections_and_keep_nobody_out(guarded: House) -> None:
    trusting = ssl._create_unverified_context()
    with contextlib.ExitStack() as stack:
        begun = [stack.enter_context(connect(guarded, CROWD)) for _ in range(3 * LIMIT)]
        for _ in range(3):
            with trusting.wrap_socket(connect(guarded, HONEST)) as honest:
                honest.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert honest.recv(100).startswith(b"HTTP/1.1 200")
        assert sum(is_open(connection) for connection in begun) <= LIMIT


def test_a_handshake_has_a_deadline(guarded: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "handshake_timeout_s", 0.2)
    began_s = time.monotonic()
    with connect(guarded, CROWD) as begun, contextlib.suppress(ConnectionResetError):
        assert begun.recv(1) == b""
    assert time.monotonic() - began_s < 3


def test_an_idle_tls_connection_costs_little_memory(guarded: House) -> None:
    """Two thousand of them have to fit beside the ceiling of the bodies."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with contextlib.ExitStack() as stack:
            for _ in range(LIMIT):
                secured = ssl._create_unverified_context().wrap_socket(connect(guarded, CROWD))
                stack.enter_context(secured)
            after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / LIMIT < 100_000
