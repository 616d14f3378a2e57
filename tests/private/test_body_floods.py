"""Bodies that are large and never end: memory has a ceiling, the flood drops its own, and everybody else is served."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import socket
import time
from collections.abc import Callable, Coroutine

import httpx
import pytest
from starlette.types import Message, Scope

from cloister.private import http_io
from cloister.private.http_io import Body
from cloister.private.problems import ProblemError
from cloister.server.load_shedding import BodyBudget, BodyCharge, BodyPace
from cloister.server.middleware.body import BodyMiddleware
from cloister.trust.sealing import CHUNKED, WHOLE, HttpRequest, RequestHead
from tests import virtual_time
from tests.private.inner import ANSWER, Inner
from tests.private.messages import ask
from tests.sealed_cloud import RELAY_SECRET, open_cloud

REQUEST = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo"), b"hello")
SCOPE: Scope = {"type": "http", "headers": [], "client": ("192.0.2.1", 1)}
KIB = 1024


def test_unfinished_bodies_at_a_gateway_stay_below_the_ceiling_and_requests_go_on() -> None:
    with open_cloud(Inner(), max_request_bytes=512 * KIB, body_ceiling_bytes=1024 * KIB) as cloud:
        gateway = httpx.URL(cloud.gateway_url)
        head = f"POST / HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {RELAY_SECRET}\r\ncontent-type: {WHOLE.request_type}"
        begun = f"{head}\r\ncontent-length: {500 * KIB}\r\n\r\n".encode() + bytes(400 * KIB)
        with contextlib.ExitStack() as stack:
            flood = [
                stack.enter_context(socket.create_connection((gateway.host, gateway.port), timeout=300)) for _ in range(12)
            ]
            for connection in flood:
                connection.sendall(begun)
                assert ask(cloud, REQUEST).content == ANSWER + b"hello"
            refused: set[socket.socket] = set()
            while len(refused) < 10:  # two of 400 KiB fit below 1 MiB
                waiting = [connection for connection in flood if connection not in refused]
                readable, _, _ = select.select(waiting, [], [], 300)
                assert readable, f"only {len(refused)} are refused"
                assert all(connection.recv(4096).startswith(b"HTTP/1.1 503") for connection in readable)
                refused |= {*readable}


def test_a_body_that_trickles_in_takes_no_connection_between_relay_and_gateway() -> None:
    with open_cloud(Inner()) as cloud:
        relay = httpx.URL(cloud.relay_url)
        head = f"POST / HTTP/1.1\r\nhost: relay\r\ncontent-type: {CHUNKED.request_type}\r\ncontent-length: 9999\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                slow = stack.enter_context(socket.create_connection((relay.host, relay.port), timeout=300))
                slow.sendall(head.encode() + b"x" * 100)
            assert ask(cloud, REQUEST).content == ANSWER + b"hello"
            assert len(cloud.relay.posts()) == 21
            assert len(cloud.gateway.posts()) == 1


def test_a_long_body_is_handed_on_before_it_is_whole() -> None:
    with open_cloud(Inner()) as cloud:
        relay = httpx.URL(cloud.relay_url)
        head = f"POST / HTTP/1.1\r\nhost: relay\r\ncontent-type: {CHUNKED.request_type}\r\ncontent-length: 999999\r\n\r\n"
        with socket.create_connection((relay.host, relay.port), timeout=300) as long:
            long.sendall(head.encode() + bytes(100 * KIB))
            give_up_s = time.monotonic() + 300
            while not cloud.gateway.posts():
                assert time.monotonic() < give_up_s
                time.sleep(0.01)


def test_who_declares_much_is_charged_for_what_came() -> None:
    budget = BodyBudget(1000, small_bytes=0)

    async def live() -> None:
        scope: Scope = {**SCOPE, "headers": [(b"content-length", b"900")]}
        waiting = [Body(scope, trickle(), 900, budget=budget).pieces(keeps=True) for _ in range(20)]
        for pieces in waiting:
            assert await anext(pieces) == b"x"
        assert budget.num_bytes == 20
        await close(*waiting)

    asyncio.run(live())


def test_the_largest_body_of_the_largest_network_gives_way_and_whole_ones_stay() -> None:
    budget = BodyBudget(100, small_bytes=0)
    honest, whole, small, large = (budget.open(network) for network in ("b", "a", "a", "a"))
    whole.add(40)
    whole.is_whole = True
    honest.add(25)
    small.add(10)
    large.add(20)
    assert not any(charge.is_shed for charge in (honest, whole, small, large))
    small.add(6)
    assert [charge.is_shed for charge in (honest, whole, small, large)] == [False, False, False, True]
    honest.add(40)  # now its network holds most
    assert [charge.is_shed for charge in (honest, whole, small)] == [True, False, False]
    assert budget.num_bytes == 56
    for charge in (honest, whole, small, large):
        charge.close()
    assert budget.num_bytes == 0


def test_whole_bodies_of_one_owner_leave_memory_for_those_of_others() -> None:
    budget = BodyBudget(1000, small_bytes=10)

    def send(num_bytes: int, owner: str) -> BodyCharge:
        charge = budget.open("network", owner)
        charge.add(num_bytes)
        charge.is_whole = True
        return charge

    held = [send(100, "flood") for _ in range(20)]
    assert [charge.is_shed for charge in held] == [False] * 7 + [True] * 13
    assert not any(send(100, owner).is_shed for owner in ("another", "a third one")), "of the same network"
    assert send(100, "flood").is_shed
    assert not send(10, "flood").is_shed, "small ones have the reserve"
    for charge in held[:5]:
        charge.close()
    assert not send(100, "flood").is_shed
    assert not send(100, "").is_shed, "whom nobody knows has no share"


def test_unfinished_bodies_of_one_owner_give_way_to_bodies_of_others_with_less() -> None:
    budget = BodyBudget(1000, small_bytes=10)

    def begin(num_bytes: int, owner: str) -> BodyCharge:
        charge = budget.open("network", owner)
        charge.add(num_bytes)
        return charge

    flood = [begin(100, "flood") for _ in range(8)]
    assert [charge.is_shed for charge in flood] == [False] * 7 + [True]
    begin(200, "another").is_whole = True
    for name in ("a third one", "a fourth one"):
        assert not begin(100, name).is_shed, "nothing is free, but for what the flood has"
    assert budget.num_bytes == 1000
    assert [charge.is_shed for charge in flood] == [True] + [False] * 6 + [True]
    for charge in flood[1:7]:
        charge.is_whole = True
    assert begin(100, "a fifth one").is_shed, "whole ones stay"


def test_a_body_that_waits_for_its_client_lets_go_as_soon_as_it_gives_way() -> None:
    async def live() -> None:
        budget = BodyBudget(1000, small_bytes=0)
        stuck = Body(SCOPE, silent_after(b"x" * 600), 1000, budget=budget)
        reading = asyncio.create_task(read(stuck, keeps=True))
        await asyncio.sleep(0.01)
        assert budget.num_bytes == 600
        other = budget.open("elsewhere")
        other.add(500)
        with pytest.raises(ProblemError, match="no memory") as refused:
            await asyncio.wait_for(reading, 60)
        assert refused.value.status == 503
        assert (budget.num_bytes, other.is_shed) == (500, False)

    asyncio.run(live())


def test_what_is_handed_on_is_charged_no_longer() -> None:
    async def live() -> None:
        budget = BodyBudget(1000, small_bytes=0)
        body = Body(SCOPE, sends(*[b"x" * 400] * 5), 5000, budget=budget)
        assert await read(body, keeps=False) == 2000

    asyncio.run(live())


@pytest.mark.parametrize(("piece", "is_slow"), [(b"x", True), (b"x" * 100, False)], ids=["slow", "steady"])
def test_a_body_has_to_keep_coming(monkeypatch: pytest.MonkeyPatch, piece: bytes, is_slow: bool) -> None:
    """One byte and a hundred every 10 ms, where a thousand a second are asked for."""
    monkeypatch.setattr(http_io, "BodyPace", functools.partial(BodyPace, grace_s=0.1, bytes_per_s=1000))

    async def live() -> int:
        return await read(Body(SCOPE, trickle(piece, 40), 10_000, timeout_s=60), keeps=True)

    if is_slow:
        with pytest.raises(ProblemError, match="too slowly") as refused:
            virtual_time.run(live())
        assert refused.value.status == 408
    else:
        assert virtual_time.run(live()) == 4000


def test_a_slow_program_behind_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_io, "BodyPace", functools.partial(BodyPace, grace_s=0.1, bytes_per_s=10_000))

    async def live() -> int:
        num_bytes = 0
        async for piece in Body(SCOPE, sends(*[b"x"] * 10), 1000, timeout_s=60).pieces(keeps=False):
            num_bytes += len(piece)
            await asyncio.sleep(0.03)  # three times the patience there is for the client
        return num_bytes

    assert virtual_time.run(live()) == 10


def test_a_plain_server_refuses_the_body_for_which_there_is_no_memory() -> None:
    replies: list[int] = []

    async def app(scope: Scope, receive: Callable[[], Coroutine[None, None, Message]], send: object) -> None:
        replies.append(len((await receive())["body"]))

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            replies.append(message["status"])

    async def live() -> None:
        budget = BodyBudget(1000, small_bytes=0)
        reader = BodyMiddleware(app, 900, 5.0, {"/read"}, budget)
        scope: Scope = {
            **SCOPE,
            "method": "POST",
            "path": "/read",
            "headers": [(b"content-type", b"application/json")],
        }
        stuck = asyncio.create_task(reader(scope, silent_after(b"x" * 800), send))
        await asyncio.sleep(0.01)
        await reader({**scope, "client": ("198.51.100.1", 1)}, sends(b"x" * 300), send)
        await asyncio.wait_for(stuck, 60)
        assert replies == [300, 503]
        assert budget.num_bytes == 0

    asyncio.run(live())


def sends(*pieces: bytes) -> Callable[[], Coroutine[None, None, Message]]:
    left = list(pieces)

    async def receive() -> Message:
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    return receive


def silent_after(first: bytes) -> Callable[[], Coroutine[None, None, Message]]:
    left = [first]

    async def receive() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def trickle(piece: bytes = b"x", count: int = 1000) -> Callable[[], Coroutine[None, None, Message]]:
    left = [count]

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        left[0] -= 1
        return {"type": "http.request", "body": piece, "more_body": left[0] > 0}

    return receive


async def read(body: Body, *, keeps: bool) -> int:
    return sum([len(piece) async for piece in body.pieces(keeps=keeps)])


async def close(*pieces: object) -> None:
    for each in pieces:
        await each.aclose()  # type: ignore[attr-defined]
