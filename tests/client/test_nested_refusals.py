"""A relay or gateway may answer with JSON nested too deeply to parse; the client reports a refusal and does not crash."""

from __future__ import annotations

import httpx
import pytest

from cloister.client import NoAnswerError
from cloister.client.envelope import read_message
from tests.client.world import Handler, World, ask_once

DEEP = b"[" * 8192


def test_a_message_that_is_nested_without_end_is_none() -> None:
    assert read_message(DEEP) == ""


def test_a_relay_that_answers_with_it_costs_draws_as_any_other_failure(world: World) -> None:
    async def refuse(request: httpx.Request, go_on: Handler) -> httpx.Response:
        if request.method == "POST" and request.url.path == "/":
            await request.aread()
            return httpx.Response(502, content=DEEP)
        return await go_on(request)

    world.wire.tamper = refuse
    with pytest.raises(NoAnswerError) as caught:
        ask_once(world)
    assert len(caught.value.draws) == 3
