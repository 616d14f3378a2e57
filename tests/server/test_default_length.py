"""How long an answer may be where a request does not say: `default_max_tokens`, within the window, by every route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.server.running_server import INFO, MODEL, RunningServer, ScriptedEngine, says, serving_script

HELLO = [{"role": "user", "content": "hi"}]
SHORT = msgspec.structs.replace(INFO, default_max_tokens=40)
LONG = "x" * 210
WINDOW = INFO.max_model_len


@pytest.fixture(scope="module")
def short(model_path: Path) -> Iterator[tuple[RunningServer, ScriptedEngine]]:
    engine = ScriptedEngine(says("ok"), model=SHORT)
    with serving_script(model_path, engine) as server:
        yield server, engine


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, 40),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 7}, 7),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 90}, 90),
        ("/v1/chat/completions", {"messages": HELLO, "min_tokens": 60}, 60),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, WINDOW - len(f"user: {LONG}\nassistant:")),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, 40),
        ("/v1/completions", {"prompt": "hi"}, 40),
        ("/v1/completions", {"prompt": ["hi", "x" * 230]}, WINDOW - 230),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 200}, 200),
        ("/v1/responses", {"input": "hi"}, 40),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 50}, 50),
        ("/api/chat", {"messages": HELLO}, 40),
        ("/api/generate", {"prompt": "hi"}, 40),
        ("/api/generate", {"prompt": "hi", "raw": True}, 40),
        ("/api/generate", {"prompt": "hi", "raw": True, "options": {"num_predict": 90}}, 90),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": -1}}, WINDOW - len("user: hi\nassistant:")),
        ("/completion", {"prompt": "hi"}, 40),
        ("/completion", {"prompt": "hi", "n_predict": 90}, 90),
        ("/completion", {"prompt": "hi", "n_predict": -1}, WINDOW - 2),
    ],
)
def test_an_answer_is_as_long_as_the_request_says_or_else_the_setting(short, path, body, expected):
    server, engine = short
    engine.taken.clear()
    assert httpx.post(server.url + path, json=body).status_code == 200
    assert {request.sampling.max_tokens for request in engine.taken} == {expected}


def test_without_a_setting_an_answer_may_fill_the_window(model_path):
    engine = ScriptedEngine(says("ok"))
    with serving_script(model_path, engine) as server:
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "hi"})):
            assert httpx.post(server.url + path, json=body).status_code == 200
    assert [request.sampling.max_tokens for request in engine.taken] == [None, None]


def test_the_list_of_models_says_how_long_an_answer_is(short):
    (model,) = httpx.get(f"{short[0].url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["default_max_tokens"]) == (MODEL, WINDOW, 40)
