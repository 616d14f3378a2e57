"""`/v1/cache` over HTTP: a client sees and drops what is kept of its own scope, and nothing of another one's."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from cloister.policy import Credentials
from tests.engine.replica import BLOCK_SIZE
from tests.server.running_server import MODEL, RunningServer, make_gate, serving, start_thinking
from tests.server.test_bad_input import check_error

PATH = "/v1/cache"
CREDENTIALS, ANN = Credentials.empty().add("ann")
CREDENTIALS, BOB = CREDENTIALS.add("bob")
PROMPT = "the same words again and again"
NOTHING = {"num_blocks": 0, "num_tokens": 0, "num_bytes": 0, "oldest_s": None, "used_s": None}


class Client:
    """A caller with a key, or with the secret of a session."""

    def __init__(self, server: RunningServer, key: str = ANN, session: str | None = None) -> None:
        self._url = server.url
        self._headers = {"authorization": f"Bearer {key}"} | ({} if session is None else {"cloister-session": session})

    def ask(self, **fields: object) -> int:
        """Returns how many tokens of the prompt were cached."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **fields}
        reply = httpx.post(f"{self._url}/v1/completions", json=body, headers=self._headers)
        assert reply.status_code == 200, reply.text
        found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    def send(self, method: str = "GET", **params: str) -> httpx.Response:
        return httpx.request(method, self._url + PATH, headers=self._headers, params=params)

    def device(self, method: str = "GET", **params: str) -> dict[str, Any]:
        """Returns what the device has of this caller, or had until it was dropped."""
        reply = self.send(method, **params)
        assert reply.status_code == 200, reply.text
        assert reply.json()["unanswered"] == []
        (place,) = reply.json()["data"]
        assert place.pop("place") == "device"
        found: dict[str, Any] = place
        return found


@pytest.fixture(scope="module")
def team(model_path: Path) -> Iterator[RunningServer]:
    with serving(model_path, lambda: start_thinking(model_path), gate=make_gate("team", CREDENTIALS)) as server:
        yield server


@pytest.fixture(scope="module")
def private(model_path: Path) -> Iterator[RunningServer]:
    with serving(model_path, lambda: start_thinking(model_path), gate=make_gate("private", CREDENTIALS)) as server:
        yield server


def test_each_tenant_sees_and_drops_its_own_only(team: RunningServer) -> None:
    ann, bob = Client(team, ANN), Client(team, BOB)
    assert ann.device() == bob.device() == NOTHING
    assert ann.ask() == bob.ask() == 0
    anns, bobs = ann.device(), bob.device()
    num_blocks = (len(PROMPT) + 1) // BLOCK_SIZE
    assert (anns["num_blocks"], anns["num_tokens"]) == (num_blocks, num_blocks * BLOCK_SIZE)
    assert anns["oldest_s"] >= anns["used_s"] >= 0
    assert bobs["num_blocks"] == num_blocks
    assert ann.device("DELETE")["num_blocks"] == num_blocks
    assert ann.device() == NOTHING
    assert bob.device()["num_blocks"] == num_blocks
    assert ann.ask() == 0
    assert bob.ask() > 0


def test_a_salt_names_a_scope_of_its_own_inside_the_tenants(team: RunningServer) -> None:
    ann = Client(team)
    ann.ask()
    ann.ask(cache_salt="x")
    assert ann.device("DELETE", cache_salt="x")["num_blocks"] > 0
    assert ann.device(cache_salt="x") == Client(team, BOB).device(cache_salt="x") == NOTHING
    assert ann.device()["num_blocks"] > 0
    for salt in ("", "x" * 257):
        error = check_error(ann.send(cache_salt=salt), 400)
        assert error["param"] == "cache_salt"


def test_a_prompt_cache_key_has_at_most_as_many_characters_as_a_salt(team: RunningServer) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "prompt_cache_key": "x" * 257}
    reply = httpx.post(f"{team.url}/v1/completions", json=body, headers={"authorization": f"Bearer {ANN}"})
    assert check_error(reply, 400)["param"] == "prompt_cache_key"


@pytest.mark.parametrize(
    ("query", "body"),
    [("salt=x", b""), ("cache_salt=x&Cache_Salt=x", b""), ("cache_salt=a&cache_salt=b", b""), ("", b'{"cache_salt": "x"}')],
)
def test_what_could_be_a_mistyped_salt_is_refused_and_nothing_is_dropped(team: RunningServer, query: str, body: bytes) -> None:
    ann = Client(team)
    ann.ask()
    reply = httpx.request("DELETE", f"{team.url}{PATH}?{query}", content=body, headers={"authorization": f"Bearer {ANN}"})
    assert "cache_salt" in str(check_error(reply, 400)["message"])
    assert ann.device()["num_blocks"] > 0


def test_a_reply_is_as_the_reference_states_it(team: RunningServer) -> None:
    document = httpx.get(f"{team.url}/openapi.json").json()
    for method, kind in (("GET", "cache"), ("DELETE", "cache.deleted")):
        reply = Client(team).send(method).json()
        operation = document["paths"][PATH][method.lower()]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator({**schema, "components": document["components"]}).validate(reply)
        assert (reply["object"], reply["scope"]) == (kind, "tenant")


def test_in_private_a_session_sees_its_own_and_a_request_without_one_sees_nothing(private: RunningServer) -> None:
    one, other = (Client(private, session=secrets.token_hex(32)) for _ in range(2))
    one.ask()
    plain = Client(private)
    plain.ask()
    assert other.device() == NOTHING
    assert plain.send().json() == {"scope": "request", "data": [], "unanswered": [], "object": "cache"}
    assert one.device("DELETE")["num_blocks"] > 0
    assert one.ask() == 0


def test_paranoid_refuses_it_in_one_line(model_path: Path) -> None:
    with serving(model_path, lambda: start_thinking(model_path), gate=make_gate("paranoid", CREDENTIALS)) as server:
        for method in ("GET", "DELETE"):
            message = str(check_error(Client(server).send(method), 403)["message"])
            assert message.startswith("T6.prefix-cache.report.paranoid")
            assert "\n" not in message
