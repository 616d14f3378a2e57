"""Both transports decide alike, for both perform what one `make_sealed_call` yields; here behind one network that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from cloister.client import AsyncSealedTransport, NoAnswerError, RelayUnreachableError, SealedTransport, Session
from cloister.client.node_selection import MAX_DRAWS
from cloister.client.token_purchase import BATCH
from tests.client.world import Handler, World

Send = Callable[[World, Session], httpx.Response]


class Blocking(httpx.BaseTransport):
    """The same network for a client that blocks."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run(self._carry(request))

    async def _carry(self, request: httpx.Request) -> httpx.Response:
        reply = await self._inner.handle_async_request(request)
        return httpx.Response(reply.status_code, headers=reply.headers, content=await reply.aread())


def send_blocking(world: World, session: Session) -> httpx.Response:
    with httpx.Client(transport=SealedTransport(session, Blocking(world.wire)), base_url="http://cloister") as client:
        return client.post("/v1/chat/completions", json={"mark": "m"})


def send_async(world: World, session: Session) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = AsyncSealedTransport(session, world.wire)
        async with httpx.AsyncClient(transport=transport, base_url="http://cloister") as client:
            return await client.post("/v1/chat/completions", json={"mark": "m"})

    return asyncio.run(run())


@pytest.fixture(params=[send_blocking, send_async], ids=["blocking", "async"])
def send(request: pytest.FixtureRequest) -> Send:
    found: Send = request.param
    return found


def fail(world: World, error: type[httpx.TransportError], times: int) -> None:
    """Makes the next sealed requests fail."""
    left = [error("for a test")] * times

    async def tamper(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/" and left:
            raise left.pop()
        return await go_on(request)

    world.wire.tamper = tamper


def test_a_request_that_breaks_off_is_drawn_again(world: World, send: Send) -> None:
    fail(world, httpx.ReadError, 1)
    answer = send(world, world.session())
    assert answer.json() == {"ok": True}
    assert len(answer.extensions["cloister"]["drawn"]) == 2
    assert world.wire.sent == 2


def test_a_request_that_always_breaks_off_ends_after_the_last_draw(world: World, send: Send) -> None:
    fail(world, httpx.ReadError, MAX_DRAWS)
    with pytest.raises(NoAnswerError) as caught:
        send(world, world.session())
    assert len(caught.value.draws) == world.wire.sent == MAX_DRAWS


def test_a_relay_that_was_not_reached_costs_no_token(world: World, send: Send) -> None:
    fail(world, httpx.ConnectError, 1)
    session = world.session()
    with pytest.raises(RelayUnreachableError):
        send(world, session)
    assert len(session._wallet) == BATCH


def test_a_silence_is_not_sent_again(world: World, send: Send) -> None:
    fail(world, httpx.ReadTimeout, 1)
    with pytest.raises(httpx.ReadTimeout):
        send(world, world.session())
    assert world.wire.sent == 1
