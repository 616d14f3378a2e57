"""The field `documents`: what the engine gets for it, what the reply says, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest

from cloister.types.request import AdapterInfo
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
        ({"documents_scale": 0.9}, "documents_scale"),
        ({"documents": TWO, "documents_temperature": 0}, "documents_temperature"),
        ({"documents": TWO, "documents_scale": 11}, "documents_scale"),
    ],
)
def test_bad_documents_are_refused_with_a_reason(server: RunningServer, body: dict[str, object], param: str) -> None:
    assert check_error(post(server, **body), 400)["param"] == param


def test_weights_without_documents_name_all_that_has_some(server: RunningServer) -> None:
    error = check_error(post(server, documents_temperature=0.5), 400)
    assert error["message"].startswith("`documents_temperature` needs `documents` or `prompt_schema`")


def test_documents_are_weighed_as_the_request_says(server: RunningServer, engine: ScriptedEngine) -> None:
    assert post(server, documents=TWO, documents_temperature=0.8, documents_scale=0.9).status_code == 200
    documents = engine.taken[-1].documents
    assert documents is not None
    assert (documents.temperature, documents.scale) == (0.8, 0.9)


def test_a_back_end_that_cannot_weigh_documents_says_so(model_path: Path) -> None:
    info = msgspec.structs.replace(INFO, document_block_size=SIZE, weighs_documents=False)
    with serving_script(model_path, ScriptedEngine(says("yes"), model=info)) as server:
        assert check_error(post(server, documents=TWO, documents_scale=0.5), 400)["param"] == "documents_scale"
        assert post(server, documents=TWO, documents_scale=1.0).status_code == 200


def chat(server: RunningServer, **body: object) -> httpx.Response:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}]
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4, **body})


def test_documents_of_a_chat_stand_before_what_the_user_says(server: RunningServer, engine: ScriptedEngine) -> None:
    assert chat(server).status_code == 200
    plain = engine.taken[-1].token_ids
    documents = [{"title": "first", "text": "one two"}, {"text": SECRET}]
    reply = chat(server, documents=documents, documents_temperature=0.8)
    assert reply.status_code == 200, reply.text
    request = engine.taken[-1]
    assert request.documents is not None
    bounds = (0, *request.documents.starts, request.documents.end, len(request.token_ids))
    prefix, first, second, rest = (request.token_ids[start:end] for start, end in pairwise(bounds))
    assert bytes(first).rstrip(b"\n") == b"first\none two"
    assert bytes(second).rstrip(b"\n") == SECRET.encode()
    assert not any(len(piece) % SIZE for piece in (prefix, first, second))
    while prefix[-1] == ord("\n"):
        prefix.pop()
    assert [*prefix, *rest[1:]] == plain
    assert request.documents.temperature == 0.8
    assert reply.json()["usage"]["prompt_tokens_details"]["document_tokens"] == len(first) + len(second)


LINKED = AdapterInfo(name="linked", digest="digest of links", path="", rank=0, num_links=3)


def test_documents_of_an_adapter_with_link_tokens_get_some_each(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.adapters.loaded["linked"] = LINKED
    assert post(server, documents=TWO).status_code == 200
    plain = engine.taken[-1]
    reply = post(server, model="linked", documents=TWO, documents_scale=0.9)
    assert reply.status_code == 200, reply.text
    request = engine.taken[-1]
    assert plain.documents is not None
    assert request.documents == msgspec.structs.replace(plain.documents, num_links=3, scale=0.9)
    assert bytes(request.token_ids) == bytes(plain.token_ids).replace(b"why?", b"\n" * 6 + b"why?")
    assert request.adapter == LINKED.digest
    details = reply.json()["usage"]
    assert (details["prompt_tokens"], details["prompt_tokens_details"]["document_tokens"]) == (8 + 24 + 6 + 4, 24)
    assert post(server, model="linked").status_code == 200
    assert engine.taken[-1].documents is None
    del engine.adapters.loaded["linked"]


def test_documents_of_a_chat_get_link_tokens_too(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.adapters.loaded["linked"] = LINKED
    assert chat(server, documents=TWO).status_code == 200
    plain = engine.taken[-1]
    assert plain.documents is not None
    assert chat(server, model="linked", documents=TWO).status_code == 200
    request, end = engine.taken[-1], plain.documents.end
    assert request.documents == msgspec.structs.replace(plain.documents, num_links=3)
    assert request.token_ids == [*plain.token_ids[:end], *[ord("\n")] * 6, *plain.token_ids[end:]]
    del engine.adapters.loaded["linked"]


def test_a_chat_without_documents_may_say_so(server: RunningServer, engine: ScriptedEngine) -> None:
    assert chat(server, documents=[]).status_code == 200
    assert engine.taken[-1].documents is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": [{"title": SECRET}]}, "documents[0].text"),
        ({"documents": TWO * 33}, "documents"),
        ({"documents_temperature": 0.5}, "documents_temperature"),
        ({"documents": TWO, "documents_prefix": SECRET}, "documents_prefix"),
        ({"documents": TWO, "messages": [{"role": "system", "content": SECRET}]}, "documents"),
        ({"documents": [{"text": SECRET * 100}]}, "messages"),
    ],
)
def test_bad_documents_of_a_chat_are_refused_with_a_reason(server: RunningServer, body: dict[str, object], param: str) -> None:
    assert check_error(chat(server, **body), 400)["param"] == param


def test_a_model_that_takes_no_documents_says_so(thinking: RunningServer) -> None:
    error = check_error(post(thinking, documents=TWO), 400)
    assert (error["param"], error["code"]) == ("documents", "no_documents")
