"""The header `cloister-session` over HTTP, on a real engine under the profile `private`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.running_server import MODEL, RunningServer, make_gate, serving, start_thinking

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "the same words again and again"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def private(model_path: Path) -> Iterator[RunningServer]:
    with serving(model_path, lambda: start_thinking(model_path), gate=make_gate("private")) as server:
        yield server


def num_cached(server: RunningServer, session: str | None) -> int:
    headers = {} if session is None else {"cloister-session": session}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, headers=headers)
    assert reply.status_code == 200, reply.text
    found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_requests_with_one_secret_share_their_prefix_and_others_find_nothing(private: RunningServer) -> None:
    one, other = secrets.token_hex(32), secrets.token_hex(32)
    assert num_cached(private, one) == 0
    assert num_cached(private, one) > 0
    assert num_cached(private, other) == num_cached(private, None) == num_cached(private, None) == 0


def test_a_secret_that_is_none_is_a_400_that_does_not_repeat_it(private: RunningServer) -> None:
    reply = httpx.post(f"{private.url}/v1/chat/completions", json=BODY, headers={"cloister-session": "zanzibar"})
    assert reply.status_code == 400
    assert "64 hexadecimal digits" in reply.json()["error"]["message"]
    assert "zanzibar" not in reply.text
