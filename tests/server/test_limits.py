"""Keys, sizes, times and queues: who is refused, how, and that nobody can hold the server up."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time

import httpx
import pytest

from cloister.engine import EngineClient
from cloister.policy import Credentials
from cloister.server import load_shedding
from cloister.server.connection import Connection
from cloister.server.load_shedding import BodyBudget
from cloister.server.middleware.body import BodyMiddleware
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import EngineError, QueueFullError
from cloister.types.events import Abort, Submit
from cloister.types.request import FinishReason
from cloister.types.scope import ScopeKind
from tests.engine.fake_transport import FakeTransport
from tests.server.running_server import (
    INFO,
    MODEL,
    RunningServer,
    ScriptedEngine,
    make_gate,
    output,
    says,
    serving,
    serving_script,
)
from tests.server.test_bad_input import check_error

BODY = {"model": MODEL, "prompt": "x"}
KEYS = Credentials.empty()
KEYS, ALICE = KEYS.add("alice", tenant="a")
KEYS, BOB = KEYS.add("bob", tenant="b", priority=3)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def engine():
    return ScriptedEngine(says("ok"))


@pytest.fixture
def guarded(model_path, engine):
    config = ServerConfig(port=0, api_keys="keys.json", drain_timeout_s=1.0)
    with serving_script(model_path, engine, gate=make_gate("team", KEYS), config=config) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/unknown", "/version"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"authorization": "Bearer"}, {"authorization": f"Basic {ALICE}"}])
def test_everything_but_health_asks_for_a_key(guarded: RunningServer, path, headers):
    reply = httpx.get(guarded.url + path, headers=headers)
    error = check_error(reply, 401)
    assert error["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_health_needs_no_key(guarded: RunningServer):
    assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_two_authorization_headers_are_none(guarded: RunningServer):
    reply = httpx.get(f"{guarded.url}/v1/models", headers=[("authorization", f"Bearer {k}") for k in ("x", ALICE)])
    check_error(reply, 401)


def test_the_key_fixes_scope_tenant_and_class(guarded: RunningServer, engine):
    for key in (ALICE, BOB, ALICE):
        assert httpx.post(f"{guarded.url}/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
    first, second, third = engine.taken
    assert first.scope == third.scope != second.scope
    assert first.scope.kind is ScopeKind.TENANT
    assert (first.tenant, second.tenant) == ("a", "b")
    assert (first.priority, second.priority) == (0, 3)


def test_a_profile_that_refuses_a_wish_says_its_rule(guarded: RunningServer):
    reply = httpx.post(f"{guarded.url}/v1/completions", json={**BODY, "priority": -5}, headers=bearer(ALICE))
    error = check_error(reply, 403)
    assert error["code"] == "refused_by_policy"
    assert "client-priority" in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(model_path, engine, chunked):
    config = ServerConfig(port=0, max_request_kb=8)
    with serving_script(model_path, engine, config=config) as server:
        body = b'{"model": "' + b"z" * 200_000 + b'"}'
        content = iter([body[i : i + 1000] for i in range(0, len(body), 1000)]) if chunked else body
        reply = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": "application/json"})
        error = check_error(reply, 413)
        assert "8 KiB" in error["message"]
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(("method", "path", "kept"), [("POST", "/health", 0), ("GET", "/read", 0), ("POST", "/read", 4000)])
def test_a_body_that_no_route_reads_is_not_kept(method, path, kept):
    """Some of those routes ask for no key, and thousands of connections may have such a body on its way."""
    pieces = [{"type": "http.request", "body": b"x" * 1000, "more_body": i < 3} for i in range(4)]
    found = []

    async def receive():
        return pieces.pop(0)

    async def app(scope, receive, send):
        found.append(await receive())

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"content-type", b"application/json")]}
    asyncio.run(BodyMiddleware(app, 8000, 5.0, {"/read"})(scope, receive, None))
    assert [len(message["body"]) for message in found] == [kept]


@pytest.mark.parametrize(("keys", "statuses"), [(KEYS, [200] * 3 + [503] * 2), (None, [200] * 4 + [503])])
def test_requests_of_one_tenant_that_last_leave_memory_for_the_bodies_of_others(keys, statuses):
    gate, budget = make_gate("team", keys), BodyBudget(400_000, reserve_bytes=0)

    async def answer(admission) -> int:
        async def receive():
            return {"type": "http.request", "body": bytes(90_000), "more_body": False}

        async def send(message) -> None:
            if message["type"] == "http.response.start":
                status.set_result(message["status"])

        async def last(scope, receive, send) -> None:
            await receive()
            status.set_result(200)
            await asyncio.sleep(600)

        status = asyncio.get_running_loop().create_future()
        scope = {"type": "http", "method": "POST", "path": "/read", "headers": [(b"content-type", b"application/json")]}
        scope["state"] = {"admission": admission}
        app = BodyMiddleware(last, 100_000, 5.0, {"/read"}, budget)
        tasks.append(asyncio.create_task(app(scope, receive, send)))
        return await status

    async def run() -> tuple[list[int], int]:
        flood = [await answer(gate.admit(ALICE)) for _ in range(5)]
        other = await answer(gate.admit(BOB))
        for task in tasks:
            task.cancel()
        return flood, other

    tasks = []
    flood, other = asyncio.run(run())
    assert flood == statuses
    assert other == (503 if keys is None else 200)


def test_a_tenant_that_is_alone_may_send_a_body_of_the_largest_size(model_path, engine, monkeypatch):
    monkeypatch.setattr(load_shedding, "BODY_CEILING_BYTES", 0)
    config = ServerConfig(port=0, api_keys="keys.json", max_request_kb=256, drain_timeout_s=1.0)
    body = b'{"model": "%s", "prompt": "x"' % MODEL.encode()
    body += b" " * (256 * 1024 - len(body) - 1) + b"}"
    with serving_script(model_path, engine, gate=make_gate("team", KEYS), config=config) as server:
        headers = {**bearer(ALICE), "content-type": "application/json"}
        assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=300).status_code == 200


@pytest.mark.parametrize("limit_bytes", [1, 2, 3, 4 << 20, 48 << 20, (64 << 20) - 1, 64 << 20, (1 << 40) + 1])
def test_the_ceiling_has_a_place_for_the_largest_body_of_one_tenant_and_for_others(limit_bytes):
    budget = BodyBudget(load_shedding.find_body_ceiling(limit_bytes), small_bytes=0, reserve_bytes=0)
    for owner, num_bytes in (("a", limit_bytes), ("b", limit_bytes // 4)):
        charge = budget.open("a network", owner)
        charge.add(num_bytes)
        assert not charge.is_shed, owner
        charge.is_whole = True


def test_a_body_that_does_not_come_is_not_waited_for(model_path, engine):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with serving_script(model_path, engine, body_timeout_s=0.3) as server:
        reply = trickle(server, head, b" ", every_s=0.05)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"within 0.3 s" in reply


def test_a_request_with_two_lengths_ends_its_connection(model_path, engine):
    """What stands behind its chunks would be another request here, and part of this one for a proxy that counts bytes."""
    lengths = b"Content-Length: 36\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + lengths
    with serving_script(model_path, engine) as server:
        reply = trickle(server, head + b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"X", every_s=0.05)
    assert reply.count(b"HTTP/1.1 ") == 1
    assert b'"version"' not in reply


def test_a_head_that_does_not_come_is_not_waited_for(model_path, engine, monkeypatch):
    monkeypatch.setattr(Connection, "request_timeout_s", 0.3)
    with serving_script(model_path, engine) as server:
        assert trickle(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X", every_s=0.05) == b""
        assert trickle(server, b"", b"", every_s=0.05) == b""
        answered = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /health HTTP/1.1\r\n"
        assert trickle(server, answered, b"X", every_s=0.05).count(b"200 OK") == 1


def trickle(server: RunningServer, first: bytes, more: bytes, *, every_s: float) -> bytes:
    """Sends `first`, then `more` again and again until the server has had enough; returns what it said."""
    host, port = server.url.removeprefix("http://").split(":")
    deadline = time.monotonic() + 300
    said = b""
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(first)
        while True:
            assert time.monotonic() < deadline, "the server waits"
            try:
                if not select.select([connection], [], [], every_s)[0]:
                    connection.sendall(more)
                    continue
                part = connection.recv(65536)
            except (BrokenPipeError, ConnectionResetError):
                break
            if not part:
                break
            said += part
    return said


def test_a_full_queue_says_when_to_come_back(model_path):
    engine = ScriptedEngine(lambda _: [QueueFullError("7 requests wait already; try again later", retry_after_s=2.4)])
    with serving_script(model_path, engine) as server:
        for stream in (False, True):
            reply = httpx.post(f"{server.url}/v1/completions", json={**BODY, "stream": stream})
            error = check_error(reply, 429)
            assert error["type"] == "rate_limit_error"
            assert reply.headers["retry-after"] == "3"


def test_one_refused_prompt_of_several_refuses_the_call_and_ends_the_others(model_path):
    def script(request):
        return [QueueFullError("full")] if request.request_id.endswith("-1") else [600.0, output(request, "late")]

    engine = ScriptedEngine(script)
    with serving_script(model_path, engine) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json={**BODY, "prompt": ["a", "b", "c"]}, timeout=300)
        assert reply.status_code == 429
        assert len(engine.left) == 3


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (FinishReason.ERROR, 503, "engine_error"),
        (FinishReason.ABORT, 503, "engine_error"),
        (FinishReason.TIMEOUT, 504, "deadline_exceeded"),
        (FinishReason.REJECTED, 400, "context_length_exceeded"),
        (FinishReason.UNSUPPORTED, 400, "unsupported_grammar"),
    ],
)
def test_a_sequence_without_an_answer_is_an_error(model_path, end, status, code):
    engine = ScriptedEngine(lambda r: [output(r, end=end, error="what the engine says")])
    with serving_script(model_path, engine) as server:
        for stream in (False, True):
            reply = httpx.post(f"{server.url}/v1/completions", json={**BODY, "stream": stream})
            assert reply.status_code == status
            assert reply.json()["error"]["code"] == code
            assert reply.json()["error"]["message"] == "what the engine says"
            assert ("retry-after" in reply.headers) == (status == 503)


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(model_path):
    engine = ScriptedEngine(lambda r: [output(r, "half"), output(r, end=FinishReason.ERROR, error="the engine died")])
    with serving_script(model_path, engine) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json={**BODY, "stream": True})
    events = reply.text.strip().split("\n\n")
    assert reply.status_code == 200
    assert "half" in events[0]
    assert '"message":"the engine died"' in events[1]
    assert events[2] == "data: [DONE]"


def test_an_engine_that_is_down_is_told_at_once(model_path):
    engine = ScriptedEngine(lambda _: [EngineError("the engine is being restarted; try again")], good=False)
    with serving_script(model_path, engine) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.head(f"{server.url}/health").status_code == 503
        assert httpx.get(f"{server.url}/v1/models").status_code == 200


def test_an_engine_that_says_nothing_is_not_waited_for(model_path, monkeypatch):
    monkeypatch.setattr("cloister.engine.request_client.GRACE_S", 0.1)
    monkeypatch.setattr("cloister.engine.client.STOP_GRACE_S", 0.1)
    transport = FakeTransport(INFO)

    async def start() -> EngineClient:
        engine = EngineClient(transport, EngineConfig())
        await engine.start()
        return engine

    with serving(model_path, start, request_timeout_s=0.1) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=300)
    assert reply.status_code == 504
    assert [type(message) for message in transport.sent[:2]] == [Submit, Abort]


def test_a_prompt_that_takes_too_long_to_read_is_given_up(model_path, engine, monkeypatch):
    read = threading.Event()
    monkeypatch.setattr("cloister.text.Tokenizer.encode", lambda *_, **__: read.wait(3600) and [1])
    with serving_script(model_path, engine, prepare_timeout_s=0.1) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY | {"logit_bias": {"1": 1}})  # in a thread: not plain
        read.set()
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "overloaded"


def test_reading_a_prompt_does_not_hold_others_up(model_path, engine, monkeypatch):
    begun, read = threading.Event(), threading.Event()
    monkeypatch.setattr("cloister.text.Tokenizer.encode", lambda *_, **__: begun.set() or (read.wait(3600) and [1]))
    with serving_script(model_path, engine) as server:
        slow = threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json=BODY | {"logit_bias": {"1": 1}}))
        slow.start()
        assert begun.wait(300)
        assert httpx.get(f"{server.url}/health", timeout=300).status_code == 200
        read.set()
        slow.join(300)


def test_every_reply_has_the_security_headers(guarded: RunningServer):
    for reply in (httpx.get(f"{guarded.url}/health"), httpx.get(f"{guarded.url}/v1/models")):
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert "server" not in reply.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("localhost:80", 200), ("[::1]:80", 200), ("10.0.0.7", 200)],
)
def test_a_keyless_local_server_is_reached_under_no_foreign_name(client, host, status):
    assert client.get("/v1/models", headers={"host": host}).status_code == status


def test_a_guarded_server_may_have_any_name(guarded: RunningServer):
    reply = httpx.get(f"{guarded.url}/v1/models", headers={"host": "llm.example", **bearer(BOB)})
    assert reply.json()["data"][0]["id"] == MODEL


def test_the_model_is_listed_under_its_served_name(model_path, engine):
    config = ServerConfig(port=0, served_model_name="org/name")
    with serving_script(model_path, engine, config=config) as server:
        listed = httpx.get(f"{server.url}/v1/models").json()
        assert listed["object"] == "list"
        assert httpx.get(f"{server.url}/v1/models/org/name").json() == listed["data"][0]
        assert httpx.post(f"{server.url}/v1/completions", json={**BODY, "model": "org/name"}).json()["model"] == "org/name"
        assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 404


def test_many_clients_at_once_all_get_their_answer(speaking: RunningServer):
    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=speaking.url, timeout=300) as client:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(60)))

    assert [reply.status_code for reply in asyncio.run(ask_all())] == [200] * 60
