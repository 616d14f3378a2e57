"""The field `documents`: what the engine gets for it, what the reply says, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.server.running_server import INFO, MODEL, RunningServer, ScriptedEngine, says, serving_script
from tests.server.test_bad_input import SECRET, check_error

PATH = "/v1/completions"
SIZE = 8
TWO = [{"text": "one two three"}, {"text": f"{SECRET}"}]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(says("yes"), model=msgspec.structs.replace(INFO, document_block_size=SIZE))


@pytest.fixture(scope="module")
def server(model_path: Path, engine: ScriptedEngine) -> Iterator[RunningServer]:
    with serving_script(model_path, engine) as server:
        yield server


def post(server: RunningServer, path: str = PATH, **body: object) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": MODEL, "prompt": "why?", "max_tokens": 4, **body})


def test_prefix_and_documents_fill_whole_blocks_and_the_prompt_follows(server: RunningServer, engine: ScriptedEngine) -> None:
    reply = post(server, documents=TWO, documents_prefix="be kind to me")
    assert reply.status_code == 200, reply.text
    request = engine.taken[-1]
    assert bytes(request.token_ids) == b"be kind to me\n\n\n" + b"one two three\n\n\n" + SECRET.encode() + b"why?"
    assert request.documents is not None
    assert (request.documents.starts, request.documents.end) == ((16, 32), 40)
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == 44
    assert usage["prompt_tokens_details"]["document_tokens"] == 24


def test_without_a_prefix_a_block_of_newlines_stands_before_the_documents(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    assert post(server, documents=TWO[1:]).status_code == 200
    assert bytes(engine.taken[-1].token_ids) == b"\n" * SIZE + SECRET.encode() + b"why?"


def test_a_reply_without_documents_does_not_speak_of_them(server: RunningServer) -> None:
    assert "document_tokens" not in post(server).json()["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": TWO * 33}, "documents"),
        ({"documents": [{"text": ""}]}, "documents[0].text"),
        ({"documents": [SECRET]}, "documents[0]"),
        ({"documents": TWO, "echo": True}, "echo"),
        ({"documents": TWO, "prompt": ["one", "two"]}, "prompt"),
        ({"documents": TWO, "prompt": [1, 2]}, "prompt"),
        ({"documents": TWO, "prompt": ""}, "prompt"),
        ({"documents": [{"text": SECRET * 100}]}, "prompt"),
        ({"documents_prefix": SECRET}, "documents_prefix"),
    ],
)
def test_bad_documents_are_refused_with_a_reason(server: RunningServer, body: dict[str, object], param: str) -> None:
    assert check_error(post(server, **body), 400)["param"] == param


def test_chats_take_no_documents(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "why?"}], "documents": TWO}
    assert check_error(httpx.post(f"{server.url}/v1/chat/completions", json=body), 400)["param"] == "documents"


def test_a_model_that_takes_no_documents_says_so(thinking: RunningServer) -> None:
    error = check_error(post(thinking, documents=TWO), 400)
    assert (error["param"], error["code"]) == ("documents", "no_documents")
