"""A token pays for so much output and no more, whatever the request inside asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from cloister.server.app import create_app
from cloister.server.calls import OUTPUT_BUDGET
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import ServerConfig
from tests.server.running_server import MODEL, ScriptedEngine, make_gate, says


class Paid:
    """An application whose requests were paid for, as a sealed node runs it."""

    def __init__(self, app: ASGIApp, budget: int | None) -> None:
        self._app, self._budget = app, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {OUTPUT_BUDGET: self._budget}
        await self._app(scope, receive, send)


async def ask(path: Path, budget: int | None, route: str, **fields: Any) -> tuple[httpx.Response, list[int | None]]:
    engine = ScriptedEngine(says("yes"))
    app = create_app(engine, Tokenizer(path), ChatTemplate.load(path), make_gate(), ServerConfig(port=0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Paid(app, budget)), base_url="http://127.0.0.1") as client:
        reply = await client.post(route, json={"model": MODEL, **fields})
    return reply, [request.sampling.max_tokens for request in engine.taken]


CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("budget", "fields", "expected"),
    [
        (None, {"max_tokens": 200}, [200]),
        (50, {"max_tokens": 20}, [20]),
        (50, {"max_tokens": 200}, [50]),
        (50, {}, [50]),
        (50, {"max_tokens": 200, "n": 4}, [12]),
    ],
)
def test_an_answer_is_no_longer_than_what_was_paid_for(
    model_path: Path, budget: int | None, fields: dict[str, Any], expected: list[int]
) -> None:
    reply, asked = asyncio.run(ask(model_path, budget, "/v1/chat/completions", **CHAT, **fields))
    assert (reply.status_code, asked) == (200, expected)


def test_several_prompts_of_one_request_share_its_budget(model_path: Path) -> None:
    reply, asked = asyncio.run(ask(model_path, 50, "/v1/completions", prompt=["a", "b"], max_tokens=20))
    assert (reply.status_code, sorted(asked)) == (200, [20, 20])
    reply, asked = asyncio.run(ask(model_path, 50, "/v1/completions", prompt=["a", "b", "c", "d"], max_tokens=20))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "token_budget_exceeded"
    assert sum(tokens or 0 for tokens in asked) <= 50


def test_more_answers_than_tokens_are_refused(model_path: Path) -> None:
    reply, asked = asyncio.run(ask(model_path, 3, "/v1/chat/completions", **CHAT, n=4))
    assert (reply.status_code, asked) == (400, [])
    assert reply.json()["error"]["param"] == "n"
