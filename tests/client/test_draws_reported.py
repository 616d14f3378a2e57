"""Once a request was sent, the client never reports it as unsent, whatever fails after."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cloister.client import NoAnswerError, SealedTransport
from cloister.client.session import DOUBT_AFTER_S
from tests.client.world import Handler, World, ask, ask_once


def dishonest(world: World, broken: str):
    """Answers no sealed request, and then withholds what the next draw needs."""

    async def act(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/":
            await request.aread()
            world.cloud.time += DOUBT_AFTER_S + 1
            return httpx.Response(502)
        if world.wire.sent and request.url.path.endswith("/epoch"):
            if broken == "away":
                raise httpx.ConnectError("no", request=request)
            return httpx.Response(503 if broken == "silent" else 200, content=b"{}")
        return await go_on(request)

    return act


@pytest.mark.parametrize("broken", ["silent", "false", "away"])
def test_a_list_that_is_withheld_after_a_draw_does_not_hide_the_draw(world: World, broken: str) -> None:
    world.wire.tamper = dishonest(world, broken)
    with pytest.raises(NoAnswerError) as caught:
        ask_once(world)
    assert world.wire.sent == 1
    assert len(caught.value.draws) == 1
    assert "othing was sent" not in str(caught.value)


def test_tokens_that_are_withheld_after_a_draw_do_not_hide_it(world: World) -> None:
    session = world.session()
    ask_once(world, session)
    session._wallet._tokens = {key: tokens[:1] for key, tokens in session._wallet._tokens.items()}

    async def act(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if request.method == "POST":
            await request.aread()
            return httpx.Response(502)
        return await go_on(request)

    world.wire.tamper = act
    with pytest.raises(NoAnswerError) as caught:
        asyncio.run(ask(world.client(session)))
    assert len(caught.value.draws) == 1


def test_the_blocking_transport_says_the_same(world: World) -> None:
    loop = asyncio.new_event_loop()

    class Near(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            async def carry() -> httpx.Response:
                content = request.read()
                asked = httpx.Request(request.method, request.url, headers=request.headers, content=content)
                answer = await world.wire.handle_async_request(asked)
                return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

            return loop.run_until_complete(carry())

    world.wire.tamper = dishonest(world, "silent")
    with (
        httpx.Client(transport=SealedTransport(world.session(), Near()), base_url="http://cloister") as client,
        pytest.raises(NoAnswerError) as caught,
    ):
        client.get("/v1/models")
    loop.close()
    assert len(caught.value.draws) == 1
