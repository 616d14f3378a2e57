"""Floods that cost nothing: sockets that say nothing, or little by little, leave everybody else alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.client
import itertools
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest

from cloister.server.connection import Connection
from cloister.server.load_shedding import ConnectionTable, network_of
from cloister.server.tls import HandshakeQueue
from cloister.types.config import ServerConfig
from tests.server.running_server import RunningServer, ScriptedEngine, says, serving_script
from tests.server.test_tls import write_pair

LIMIT = 8
CROWD_SIZE = 100
CROWD, NEIGHBOUR, HONEST = "127.1.1.1", "127.1.1.2", "127.2.2.2"
"""The first two are of one /24."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
def small(model_path: Path) -> Iterator[RunningServer]:
    config = ServerConfig(port=0, max_connections=LIMIT, drain_timeout_s=1.0)
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config) as server:
        yield server


def port_of(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


def connect(server: RunningServer, source: str, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port_of(server)), timeout=300, source_address=(source, 0))
    connection.sendall(data)
    return connection


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline_s, "it does not happen"
        time.sleep(0.01)


def ask_health(server: RunningServer, source: str = HONEST) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=300, source_address=(source, 0))
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
def test_sockets_without_a_whole_request_keep_nobody_out(small: RunningServer, data: bytes, source: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * LIMIT):
            stack.enter_context(connect(small, CROWD, data))
        assert [ask_health(small, source) for _ in range(5)] == [200] * 5


def test_the_crowd_gives_way_and_not_an_idle_connection_of_somebody_else(small: RunningServer) -> None:
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
def guarded(model_path: Path, tmp_path: Path) -> Iterator[RunningServer]:
    certfile, keyfile = write_pair(tmp_path)
    config = ServerConfig(port=0, max_connections=LIMIT, drain_timeout_s=1.0, certfile=str(certfile), keyfile=str(keyfile))
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config) as server:
        yield server


@pytest.fixture
def crowded(model_path: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """Has room for a crowd."""
    certfile, keyfile = write_pair(tmp_path)
    config = ServerConfig(port=0, drain_timeout_s=1.0, certfile=str(certfile), keyfile=str(keyfile))
    with serving_script(model_path, ScriptedEngine(says("ok")), config=config) as server:
        yield server


def test_handshakes_that_never_end_are_counted_as_connections_and_keep_nobody_out(guarded: RunningServer) -> None:
    trusting = ssl._create_unverified_context()
    with contextlib.ExitStack() as stack:
        begun = [stack.enter_context(connect(guarded, CROWD)) for _ in range(3 * LIMIT)]
        for _ in range(3):
            with trusting.wrap_socket(connect(guarded, HONEST)) as honest:
                honest.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert honest.recv(100).startswith(b"HTTP/1.1 200")
        assert sum(is_open(connection) for connection in begun) <= LIMIT


def test_a_handshake_has_a_deadline(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "handshake_timeout_s", 0.2)
    with connect(guarded, CROWD) as begun, contextlib.suppress(ConnectionResetError):
        assert begun.recv(1) == b""  # with no deadline it would never come


def hello() -> bytes:
    """A ClientHello, made without a server."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl._create_unverified_context().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def test_a_handshake_waits_for_no_crowd_of_another_network(crowded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are there before the honest one; those that are answered before it is are few."""
    begun: list[str] = []
    enter = HandshakeQueue.enter

    def enter_noted(queue: HandshakeQueue, connection: Hashable, network: str, begin: Callable[[], None]) -> None:
        def begin_noted() -> None:
            begun.append(network)
            begin()

        enter(queue, connection, network, begin_noted)

    monkeypatch.setattr(HandshakeQueue, "enter", enter_noted)
    wait_until(lambda: crowded.uvicorn.started)
    all_sent = threading.Event()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(crowded, CROWD)) for _ in range(CROWD_SIZE)]
        honest = stack.enter_context(connect(crowded, HONEST))
        hellos = [hello() for _ in range(CROWD_SIZE + 1)]
        crowded.uvicorn.servers[0].get_loop().call_soon_threadsafe(all_sent.wait, 300)
        for one, data in zip((*crowd, honest), hellos, strict=True):
            one.sendall(data)
        all_sent.set()
        assert honest.recv(1) == b"\x16"
    assert begun.index(network_of(HONEST)) < CROWD_SIZE / 2


async def run_queue(cost_s: float, num_turns: int) -> tuple[list[str], float]:
    """What began in so many turns of a loop, and the seconds that it took."""
    queue, begun = HandshakeQueue(ssl.create_default_context()), list[str]()

    def begin(name: str) -> None:
        begun.append(name)
        for _ in range(100):  # so that the mean is there
            queue.note_cost(cost_s)

    for name in ("crowd 1", "crowd 2", "crowd 3", "gone"):
        queue.enter(name, "192.0.2.0/24", functools.partial(begin, name))
    queue.enter("honest", "198.51.100.0/24", functools.partial(begin, "honest"))
    queue.leave("gone", "192.0.2.0/24")
    began_s = time.monotonic()
    for turn in range(num_turns):
        await asyncio.sleep(0)
        assert len(begun) <= turn + 1
    while len(begun) < 4:
        await asyncio.sleep(0.001)
    return begun, time.monotonic() - began_s


def test_handshakes_begin_one_in_each_turn_of_the_loop_and_networks_take_turns() -> None:
    begun, _ = asyncio.run(run_queue(cost_s=0.0, num_turns=4))
    assert begun == ["crowd 3", "honest", "crowd 2", "crowd 1"]


def test_handshakes_leave_four_fifths_of_the_time_to_others() -> None:
    _, took_s = asyncio.run(run_queue(cost_s=0.01, num_turns=4))
    assert took_s > 2 * 0.01 / 0.2  # the first pause was made before anything was known of the cost


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_hello_may_come_in_pieces(guarded: RunningServer, cut: int) -> None:
    with connect(guarded, HONEST) as honest:
        data = hello()
        honest.sendall(data[:cut])
        time.sleep(0.05)
        honest.sendall(data[cut:])
        assert honest.recv(1) == b"\x16"


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" + bytes(2**16)], ids=["HTTP", "too much"])
def test_what_is_no_hello_is_closed_at_once(guarded: RunningServer, data: bytes) -> None:
    with connect(guarded, CROWD) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(data)
        while stranger.recv(100):  # a plain server's TLS alert
            pass


def test_connections_that_arrive_together_are_not_all_accepted_before_anybody_is_served(crowded: RunningServer) -> None:
    """A request of an open connection does not wait until all of a crowd are let in."""
    wait_until(lambda: crowded.uvicorn.started)
    loop, table = crowded.uvicorn.servers[0].get_loop(), crowded.uvicorn.config.http_protocol_class.table
    sizes: list[int] = []

    def count() -> None:
        sizes.append(len(table._networks))
        if len(sizes) < 10 * CROWD_SIZE:
            loop.call_soon(count)

    with contextlib.ExitStack() as stack:
        are_there = threading.Event()
        loop.call_soon_threadsafe(are_there.wait, 300)  # so that all of the crowd is there when the server looks
        for _ in range(CROWD_SIZE):
            stack.enter_context(connect(crowded, CROWD))
        loop.call_soon_threadsafe(count)
        are_there.set()
        wait_until(lambda: len(sizes) == 10 * CROWD_SIZE)
    assert sizes[-1] == CROWD_SIZE
    assert max(after - before for before, after in itertools.pairwise(sizes)) <= 16


def test_an_idle_tls_connection_costs_little_memory(guarded: RunningServer) -> None:
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
