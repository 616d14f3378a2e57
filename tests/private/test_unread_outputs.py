"""Outputs of the engine that wait for a sealed client that reads nothing: a node ends its response before they are too many."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cloister.private import node
from cloister.server.unread_replies import UnreadReplies, reply_of
from cloister.trust.sealing import CHUNKED, HttpRequest, RequestHead
from tests.private.messages import http
from tests.sealed_cloud import open_cloud

LIMIT_BYTES = 2**20

REQUEST = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/stream"), b"")


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "UnreadReplies", lambda *_: UnreadReplies(LIMIT_BYTES, LIMIT_BYTES))


class Engine:
    """A server whose engine goes on while its reply waits for the client.

    Attributes:
        num_bytes: most that waited.
        over: set when it was cancelled, or came to its end.
    """

    def __init__(self, num_outputs: int) -> None:
        self.num_outputs = num_outputs
        self.num_bytes = 0
        self.over = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread, waiting = reply_of(scope), 0
        assert unread is not None

        async def make() -> None:
            nonlocal waiting
            for _ in range(self.num_outputs):
                waiting += 4096
                unread.queue(4096)
                self.num_bytes = max(self.num_bytes, waiting)
                await asyncio.sleep(0.0001)

        making = asyncio.create_task(make())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while waiting or not making.done():
                if waiting:
                    waiting -= 4096
                    unread.queue(-4096)
                    await send({"type": "http.response.body", "body": bytes(64 * 1024), "more_body": True})
                else:
                    await asyncio.sleep(0.001)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            making.cancel()
            self.over.set()


def test_a_sealed_stream_that_nobody_reads_ends_before_it_takes_more_than_its_share() -> None:
    engine = Engine(100_000)
    with open_cloud(engine) as cloud:
        sealed, _, _ = cloud.seal(REQUEST)
        relay = httpx.URL(cloud.relay_url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((relay.host, relay.port))
            fields = f"host: relay\r\ncontent-type: {CHUNKED.request_type}\r\ncontent-length: {len(sealed)}"
            client.sendall(f"POST / HTTP/1.1\r\n{fields}\r\n\r\n".encode() + sealed)
            assert engine.over.wait(60), "the engine's outputs go on to collect"
        assert LIMIT_BYTES <= engine.num_bytes <= LIMIT_BYTES + 2 * 4096


def test_a_sealed_stream_that_is_read_is_whole() -> None:
    engine = Engine(500)
    with open_cloud(engine) as cloud:
        sealed, _, _ = cloud.seal(REQUEST)
        reply = http.post(cloud.relay_url, content=sealed, headers={"content-type": CHUNKED.request_type})
        assert len(reply.content) > 500 * 64 * 1024
