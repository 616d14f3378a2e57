"""A sealed request with a field twice is answered with a refusal in the shape of every answer, and leaves no line in a log."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from cloister.private.http_io import REPLAY_WINDOW_S
from cloister.private.node import NodeConfig, node_app
from cloister.private.serving import Lifespan
from cloister.private.unsealing import LocalUnsealer
from cloister.trust.sealing import (
    CHUNKED,
    HttpRequest,
    KeyRing,
    MessageReader,
    Receiver,
    ReplayCache,
    RequestHead,
    ResponseHead,
    ResponseOpener,
    bucket_bytes,
    encode_request,
    seal_chunked_request,
)
from cloister.trust.shape import Unshaper, shape_of
from tests.private.inner import Inner

JSON = (b"content-type", b"application/json")
DATE = (b"date", b"Mon, 23 Nov 2026 11:00:00 GMT")
FRAMING = (b"cloister-framing", b"frames")
DOUBLED = {
    "framing": (FRAMING, FRAMING),
    "date": (DATE, DATE),
    "receipt": ((b"cloister-receipt", b"AA"), (b"cloister-receipt", b"AA")),
    "budget": ((b"cloister-token-budget", b"000000001"), (b"cloister-token-budget", b"000000001")),
}


def ask(fields: tuple[tuple[bytes, bytes], ...]) -> tuple[int, int]:
    """Returns the status that was sealed and how many bytes the answer had."""
    ring = KeyRing(0.0)
    unsealer = LocalUnsealer(Receiver(ring, ReplayCache(REPLAY_WINDOW_S)), lambda: 0.0)
    node = node_app(Inner(), NodeConfig(shape=shape_of("private")), unsealer, Lifespan(None))
    message = encode_request(HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo", (JSON, *fields)), b"{}"))
    sealed, exchange = seal_chunked_request(ring.current.configuration, message.ljust(bucket_bytes(len(message)), b"\0"))

    async def post() -> bytes:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(node), base_url="http://node.test") as client:
            answer = await client.post("/ohttp", content=sealed, headers={"content-type": CHUNKED.request_type})
            assert answer.status_code == 200
            return answer.content

    content = asyncio.run(post())
    opener, unshaper, reader = ResponseOpener(exchange), Unshaper(required=True), MessageReader()
    plain = b"".join(unshaper.feed(chunk) for chunk in (*opener.feed(content), opener.close()))
    unshaper.close()
    heads = [part for part in reader.feed(plain) if isinstance(part, ResponseHead)]
    return heads[-1].status, len(content)


@pytest.mark.parametrize("name", DOUBLED)
def test_a_doubled_field_is_refused_like_everything_else(name: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = ask(())
    with caplog.at_level(logging.INFO, logger="cloister"):
        status, length = ask(DOUBLED[name])
    assert (status, length) == (400, whole[1])
    assert caplog.records == [], "an operator reads of no single request"
