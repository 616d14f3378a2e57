"""Bounds of every program on the way: memory, time, connections."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from cloister.private.http_io import Body, GoneError, Outgoing, run_while_there
from cloister.private.problems import ProblemError
from cloister.private.upstream import Upstream
from cloister.trust.sealing import CHUNKED, HttpRequest, RequestHead
from tests.private.inner import ANSWER, Inner
from tests.private.messages import ask, http
from tests.sealed_cloud import open_cloud

REQUEST = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo"), b"hello")
SCOPE: Scope = {"type": "http", "headers": []}
PIECE = bytes(64 * 1024)
ENOUGH_BYTES = 64 * 2**20


class Flood:
    """Answers with more than anybody keeps.

    Attributes:
        num_bytes: what it could hand on so far.
        over: set when it was cancelled, or came to its end.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.over = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while self.num_bytes < ENOUGH_BYTES:
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
                self.num_bytes += len(PIECE)
        finally:
            self.over.set()


def test_an_answer_that_nobody_reads_waits_and_is_kept_nowhere() -> None:
    flood = Flood()
    with open_cloud(flood) as cloud:
        sealed, _, _ = cloud.seal(REQUEST)
        relay = httpx.URL(cloud.relay_url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
            client.connect((relay.host, relay.port))
            fields = f"host: relay\r\ncontent-type: {CHUNKED.request_type}\r\ncontent-length: {len(sealed)}"
            client.sendall(f"POST / HTTP/1.1\r\n{fields}\r\n\r\n".encode() + sealed)
            before = -1
            while flood.num_bytes == 0 or before != flood.num_bytes:  # until it stands still
                before = flood.num_bytes
                time.sleep(0.3)
            assert not flood.over.is_set()
            assert flood.num_bytes < ENOUGH_BYTES / 2, "only what sockets hold on three hops has left the server"
        assert flood.over.wait(300), "the node goes on though the client has left"


def test_many_ask_at_once_and_each_gets_its_own_answer_over_few_connections() -> None:
    with open_cloud(Inner()) as cloud:
        contents = [b"request %d" % number for number in range(24)]

        def ask_one(content: bytes) -> bytes:
            return ask(cloud, HttpRequest(REQUEST.head, content)).content

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask_one, contents)) == [ANSWER + content for content in contents]
        for record in (cloud.gateway, cloud.node):
            assert len({seen.client for seen in record.posts()}) <= 8, "connections are kept for the next request"


async def hang(_: Message) -> None:
    await asyncio.Event().wait()


def test_a_client_that_does_not_read_counts_as_gone() -> None:
    async def live() -> None:
        with pytest.raises(GoneError):
            await Outgoing(hang, write_timeout_s=0.05).begin(200, ())

    asyncio.run(live())


def test_a_request_that_trickles_in_is_given_up() -> None:
    async def trickle() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def live() -> None:
        with pytest.raises(ProblemError, match="did not arrive within") as refused:
            async for _ in Body(SCOPE, trickle, 1000, 0.2).pieces(keeps=True):
                pass
        assert refused.value.status == 408

    asyncio.run(live())


def test_an_answer_that_falls_silent_is_given_up() -> None:
    inner = Inner()
    with open_cloud(inner, answer_timeout_s=2.0) as cloud:
        sealed, _, _ = cloud.seal(HttpRequest(RequestHead("POST", "https", "localhost", "/v1/stream")))
        inner.go.release()
        with pytest.raises(httpx.RemoteProtocolError):  # not the client's own patience
            http.post(cloud.relay_url, content=sealed, headers={"content-type": CHUNKED.request_type})
        assert inner.cancelled.wait(300)


def test_work_is_cancelled_when_the_client_goes_but_not_when_only_its_last_steps_are_left() -> None:
    async def disconnect() -> Message:
        return {"type": "http.disconnect"}

    async def take(_: Message) -> None:
        pass

    async def live(*, finished: bool) -> list[str]:
        body, out, steps = Body(SCOPE, disconnect, 0), Outgoing(take), []

        async def work() -> None:
            try:
                await out.write(b"", last=finished)
                body.is_read.set()
                await asyncio.sleep(0.05)
                steps.append("done")
            finally:
                await asyncio.sleep(0.01)
                steps.append("tidied")

        await run_while_there(work(), body, out, disconnect)
        return steps

    assert asyncio.run(live(finished=False)) == ["tidied"]
    assert asyncio.run(live(finished=True)) == ["done", "tidied"]


def test_an_answer_longer_than_a_file_may_be_is_not_read_to_its_end() -> None:
    async def live(url: str) -> None:
        upstream = Upstream("node")
        with pytest.raises(ProblemError, match="longer than it may be"):
            await upstream.get(url, most_bytes=1000)
        await upstream.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_one() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n" + bytes(2000))
                connection.recv(1)

        thread = threading.Thread(target=serve_one, daemon=True)
        thread.start()
        asyncio.run(live(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join(300)
        assert not thread.is_alive(), "the connection is closed"


def test_a_mistake_in_a_body_of_its_own_goes_through_the_way_upstream() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"a beginning"
        raise ProblemError(413, "too long")

    async def live(url: str) -> None:
        upstream = Upstream("node")
        with pytest.raises(ProblemError, match="too long"):
            async with upstream.ask("POST", url, {}, pieces()):
                pass
        await upstream.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(live(f"http://127.0.0.1:{listener.getsockname()[1]}"))
