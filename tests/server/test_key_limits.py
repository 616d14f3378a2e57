"""Limits of keys over HTTP: who is refused and told when to come back, and that nothing is charged twice or kept."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from cloister.policy import Credentials, KeyQuota
from cloister.server.middleware.failures import format_duration
from cloister.types.config import ServerConfig
from cloister.types.errors import EngineError, QueueFullError
from tests.server.running_server import (
    MODEL,
    ScriptedEngine,
    make_gate,
    says,
    serving,
    serving_script,
    start_slow,
    start_speaking,
    start_thinking,
)
from tests.server.test_bad_input import check_error
from tests.server.test_floods import wait_until

CONFIG = ServerConfig(port=0, api_keys="keys.json", drain_timeout_s=1.0)


@contextmanager
def limited(model_path, limits: KeyQuota, engine: ScriptedEngine | None = None, start=start_speaking):
    """A server and a client whose key has the limits."""
    credentials, key = Credentials.empty().add("ann", limits=limits, is_operator=True)
    gate = make_gate("team", credentials)
    run = (
        serving(model_path, lambda: start(model_path), gate=gate, config=CONFIG)
        if engine is None
        else serving_script(model_path, engine, gate=gate, config=CONFIG)
    )
    headers = {"authorization": f"Bearer {key}"}
    with run as server, httpx.Client(base_url=server.url, headers=headers, timeout=300) as client:
        yield client


def complete(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"model": MODEL, "prompt": "four", "max_tokens": 3, **fields})


def test_a_request_too_many_in_a_minute_is_refused_and_reading_is_free(model_path):
    with limited(model_path, KeyQuota(requests_per_minute=2)) as client:
        first = complete(client)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] in ("1m0s", *(f"{left_s}s" for left_s in range(1, 60)))
        assert complete(client, temperature=9).status_code == 400
        for _ in range(3):
            assert client.get("/v1/models").status_code == 200
        refused = complete(client)
        error = check_error(refused, 429)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 50 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        counted = client.get("/metrics").text
        assert 'cloister_http_replies_total{route="/v1/completions",status="429"} 1.0' in counted


@pytest.mark.parametrize("error", [QueueFullError("full"), EngineError("the engine is being restarted; try again")])
def test_what_the_server_could_not_serve_is_not_charged(model_path, error):
    with limited(model_path, KeyQuota(2, 1, 50), ScriptedEngine(lambda _: [error])) as client:
        for _ in range(5):
            reply = complete(client)
            assert reply.status_code == error.status
            assert reply.json()["error"]["code"] == error.code
        assert reply.headers["x-ratelimit-remaining-tokens"] == "50"


def test_so_many_requests_at_once_and_the_next_when_one_has_ended(model_path):
    goes_on = threading.Event()
    engine = ScriptedEngine(lambda r: [goes_on, *says("ok")(r)])
    with limited(model_path, KeyQuota(concurrent_requests=1), engine) as client:
        slow = threading.Thread(target=complete, args=(client,))
        slow.start()
        wait_until(lambda: bool(engine.taken))
        refused = complete(client)
        goes_on.set()
        assert "1 requests open at once" in check_error(refused, 429)["message"]
        assert refused.headers["retry-after"] == "1"
        slow.join()
        assert complete(client).status_code == 200


def test_a_client_that_leaves_makes_room_for_the_next(model_path):
    with limited(model_path, KeyQuota(concurrent_requests=1), start=start_slow) as client:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert complete(client).status_code == 429
        deadline = time.monotonic() + 300
        while complete(client).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def remaining(client: httpx.Client) -> int:
    return int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"])


def test_tokens_are_reserved_and_what_was_not_used_comes_back(model_path):
    with limited(model_path, KeyQuota(tokens_per_day=100)) as client:
        reply = complete(client, max_tokens=50, stop="5")
        used = reply.json()["usage"]
        assert used["completion_tokens"] < 50
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 100 - used["total_tokens"]
        assert remaining(client) == 100 - used["total_tokens"]
        error = check_error(complete(client, max_tokens=100), 429)
        assert f"have {remaining(client)} left" in error["message"]
        assert "this request may need 104" in error["message"]
        before = remaining(client)
        assert complete(client, prompt=["four", "five"], max_tokens=3, n=2).status_code == 200
        assert remaining(client) == before - 2 * (4 + 2 * 3)


def test_a_beam_search_costs_what_its_beams_were_extended_by(model_path):
    with limited(model_path, KeyQuota(tokens_per_day=100), start=start_thinking) as client:
        search = {"use_beam_search": True, "ignore_eos": True, "prompt": "four"}
        assert complete(client, best_of=4, max_tokens=10, **search).json()["usage"]["total_tokens"] == 4 + 10
        assert remaining(client) == 100 - 4 - (1 + 9 * 4)  # the first token of all beams comes from the prompt


def test_one_prompt_of_several_that_is_too_much_refuses_the_call_and_gives_the_others_back(model_path):
    with limited(model_path, KeyQuota(tokens_per_day=100), start=start_slow) as client:
        assert complete(client, prompt=["four"] * 3, max_tokens=40).status_code == 429
        deadline = time.monotonic() + 300
        while remaining(client) < 60:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_key_without_limits_gets_no_headers_of_limits(model_path):
    with limited(model_path, KeyQuota()) as client:
        assert not [name for name in complete(client).headers if name.startswith("x-ratelimit")]


def test_every_reply_has_an_id_of_its_own(model_path):
    with limited(model_path, KeyQuota()) as client:
        ids = {complete(client, **fields).headers["x-request-id"] for fields in ({}, {"stream": True}, {"n": 0})}
        ids.add(httpx.get(f"{client.base_url}/v1/models").headers["x-request-id"])
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (59.2, "1m0s"), (61, "1m1s"), (3600, "1h0m0s"), (86399.5, "24h0m0s")],
)
def test_times_are_written_as_openai_does(duration_s, text):
    assert format_duration(duration_s) == text
