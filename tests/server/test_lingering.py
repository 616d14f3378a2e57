"""A client finds the reply that refuses its body, also one that sends all of it first and a connection that is closed."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloister.policy import Credentials
from cloister.server.middleware import lingering
from cloister.server.middleware.lingering import LingeringMiddleware
from cloister.types.config import ServerConfig
from tests.server.running_server import RunningServer, ScriptedEngine, make_gate, says, serving_script
from tests.server.test_floods import connect

CHAT = "/v1/chat/completions"
BODY = b'{"messages":[{"role":"user","content":"' + b"x" * 8_000_000 + b'"}]}'
"""More than the buffers of a connection hold."""


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A client that a busy machine stops for a second is not given up, but by the tests that are about it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lingering, "LINGER_GRACE_S", 300.0)
        patch.setattr(LingeringMiddleware.__init__, "__defaults__", (300.0, lingering.LINGER_BYTES))
        yield


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[RunningServer]:
    with serving_script(model_path, ScriptedEngine(says("ok")), config=ServerConfig(port=0, drain_timeout_s=1.0)) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(model_path: Path) -> Iterator[RunningServer]:
    config = ServerConfig(port=0, api_keys="keys.json", drain_timeout_s=1.0)
    with serving_script(
        model_path,
        ScriptedEngine(says("ok")),
        gate=make_gate("team", Credentials.empty().add("alice", tenant="a")[0]),
        config=config,
    ) as one:
        yield one


def send(server: RunningServer, path: str, media_type: str) -> tuple[int, Any]:
    """Sends with a client that closes the connection, and reads only when all is sent."""
    request = urllib.request.Request(server.url + path, BODY, {"Content-Type": media_type})
    with pytest.raises(urllib.error.HTTPError) as found:
        urllib.request.urlopen(request, timeout=300)
    return found.value.code, json.loads(found.value.read())["error"]["code"]


@pytest.mark.parametrize(
    ("path", "media_type", "refusal"),
    [
        (CHAT, "application/json", (413, "request_too_large")),
        ("/nothing", "application/json", (413, "request_too_large")),
        (CHAT, "text/plain", (415, "unsupported_media_type")),
    ],
)
def test_a_client_that_closes_its_connection_finds_the_refusal(
    server: RunningServer, path: str, media_type: str, refusal: tuple[int, str]
) -> None:
    assert [send(server, path, media_type) for _ in range(3)] == [refusal] * 3


def test_a_client_without_a_key_finds_the_refusal(guarded: RunningServer) -> None:
    assert send(guarded, CHAT, "application/json") == (401, "invalid_api_key")


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("chunked", [False, True])
def test_httpx_finds_the_refusal(server: RunningServer, connection: str, chunked: bool) -> None:
    content = iter([BODY[i : i + 65_536] for i in range(0, len(BODY), 65_536)]) if chunked else BODY
    headers = {"content-type": "application/json", "connection": connection}
    reply = httpx.post(server.url + CHAT, content=content, headers=headers, timeout=300)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    "headers", [[], ["Expect:"], ["Expect: 100-continue"], ["Connection: close"], ["Transfer-Encoding: chunked"]]
)
@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_finds_the_refusal(server: RunningServer, tmp_path: Path, headers: list[str], version: str) -> None:
    (tmp_path / "body").write_bytes(BODY)
    options = [option for header in ["Content-Type: application/json", *headers] for option in ("-H", header)]
    command = ["curl", "-sS", "-m", "300", version, "--data-binary", f"@{tmp_path / 'body'}", *options, server.url + CHAT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "request_too_large"


def test_a_client_that_waits_to_be_asked_for_its_body_is_not_waited_for(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LingeringMiddleware.__init__, "__defaults__", (3600.0, lingering.LINGER_BYTES))
    config = ServerConfig(port=0, drain_timeout_s=1.0)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += f"Content-Length: {len(BODY)}\r\nExpect: 100-continue\r\n\r\n"
    with (
        serving_script(model_path, ScriptedEngine(says("ok")), config=config) as server,
        connect(server, "127.0.0.1", head.encode()) as client,
    ):
        client.settimeout(300)
        reply = b""
        while piece := client.recv(4096):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 413")


class Refusing:
    """Replies without a look at the body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"no"})


def linger(middleware: LingeringMiddleware, pieces: list[bytes]) -> tuple[int, list[bool]]:
    """Returns how many pieces were read, and of each message of the reply's body whether more follow.

    After the pieces the client is silent.
    """
    sent: list[bool] = []
    left = list(pieces)

    async def receive() -> Any:
        if not left:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message.get("more_body", False))

    scope = {"type": "http", "http_version": "1.1", "headers": [(b"content-length", b"9999")]}
    asyncio.run(middleware(scope, receive, send))
    return len(pieces) - len(left), sent


def test_a_client_that_stops_is_waited_for_so_long_only() -> None:
    assert linger(LingeringMiddleware(Refusing(), linger_s=0.05), [b"x"] * 3) == (3, [True, False])


def test_a_client_that_pauses_is_waited_for_much_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_GRACE_S", 1.0)
    began_s = time.monotonic()
    assert linger(LingeringMiddleware(Refusing(), linger_s=3600), [b"x"] * 3) == (3, [True, False])
    assert time.monotonic() - began_s < 60


def test_so_much_is_read_only() -> None:
    assert linger(LingeringMiddleware(Refusing(), linger_bytes=4), [b"xx"] * 10) == (2, [True, False])


def test_so_many_linger_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "MAX_LINGERING", 0)
    assert linger(LingeringMiddleware(Refusing()), [b"x"]) == (0, [False])


def test_a_refused_socket_is_closed_when_all_has_arrived(server: RunningServer) -> None:
    head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    with connect(server, "127.0.0.1", head.encode()) as client:
        client.settimeout(300)
        client.sendall(BODY)
        client.shutdown(socket.SHUT_WR)
        reply = b""
        while piece := client.recv(4096):
            reply += piece
    assert b" 413 " in reply.splitlines()[0]


def test_what_was_read_of_a_refused_body_is_free_while_the_rest_is_awaited() -> None:
    class Body(bytearray):
        """One that can be referred to weakly."""

    kept: list[weakref.ref[Body]] = []
    seen: list[bool] = []

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        body = Body(b"x" * 1000)
        kept.append(weakref.ref(body))
        await receive()
        await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": bytes(body[:1])})

    async def receive() -> Any:
        seen.append(kept[0]() is None)
        return {"type": "http.request", "body": b"y", "more_body": len(seen) < 3}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "headers": [(b"content-length", b"3000")]}
    asyncio.run(LingeringMiddleware(refuse)(scope, receive, send))
    assert seen == [False, True, True]
