"""What a network sees of answers with a receipt and without: the same sizes in the same order, in every shape."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cloister.client.envelope import Answer, BrokenAnswerError
from cloister.trust.receipts import Wish, with_wish
from cloister.trust.sealing import HttpRequest, OhttpContext, RequestHead
from cloister.trust.shape import TrafficShape, shape_of
from tests.private.messages import post
from tests.sealed_cloud import LoopbackCloud, open_cloud

WISH = Wish("ab" * 32, "cd" * 32)
SHAPES = {
    "as it comes": None,
    "private": shape_of("private"),
    "constant": TrafficShape(frame_bytes=512, tick_s=0.004, constant=True),
}
KINDS = ("short", "edge", "stream", "refused", "missing")


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    kind = scope["path"].rpartition("/")[2]
    await send({"type": "http.response.start", "status": 400 if kind == "refused" else 200, "headers": []})
    for number in range(5 if kind == "stream" else 0):
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
    if kind == "broken":
        await send({"type": "http.response.body", "body": b"data: a beginning\n\n", "more_body": True})
        raise RuntimeError("the engine died")
    # a whole answer that just fills a kibibyte with its padding: 105 bytes more would be the next bucket
    body = b"x" * {"edge": 950, "stream": 0}.get(kind, 9)
    await send({"type": "http.response.body", "body": body, "more_body": False})


@pytest.fixture(scope="module", params=list(SHAPES))
def cloud(request: pytest.FixtureRequest) -> Iterator[LoopbackCloud]:
    with open_cloud(answer, shape=SHAPES[request.param]) as cloud:
        yield cloud


def see(cloud: LoopbackCloud, kind: str, wish: Wish | None) -> tuple[list[tuple[int, list[int]]], bytes | None]:
    """Bytes in, and the pieces out, at relay, gateway and node; and the signature at the end of the answer."""
    path = f"/v1/{kind}" if kind != "missing" else "/elsewhere"
    asked, _ = with_wish(HttpRequest(RequestHead("POST", "https", "localhost", path)), wish)
    sealed, outer, inner = cloud.seal(asked)
    reply = post(cloud, sealed)
    assert reply.status_code == 200
    seen = [record.posts()[-1] for record in (cloud.relay, cloud.gateway, cloud.node)]
    return [(len(one.request), [len(piece) for _, piece in one.pieces]) for one in seen], _signature(
        outer, inner, reply.content
    )


def _signature(outer: OhttpContext, inner: OhttpContext, sealed: bytes) -> bytes | None:
    answer = Answer(outer, inner, shaped=False)
    answer.feed(sealed)
    answer.close()
    return answer.signature


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_on_the_way_can_tell_who_asked_for_a_receipt(cloud: LoopbackCloud, kind: str) -> None:
    without, no_signature = see(cloud, kind, None)
    with_one, signature = see(cloud, kind, WISH)
    assert no_signature is None
    assert signature is not None
    assert with_one == without


def test_a_stream_that_breaks_off_at_the_node_ends_without_a_receipt(cloud: LoopbackCloud) -> None:
    asked, _ = with_wish(HttpRequest(RequestHead("POST", "https", "localhost", "/v1/broken")), WISH)
    sealed, outer, inner = cloud.seal(asked)
    answer = Answer(outer, inner, shaped=False)

    def read() -> None:
        answer.feed(post(cloud, sealed).content)
        answer.close()

    with pytest.raises((BrokenAnswerError, httpx.RemoteProtocolError)):  # cut on the wire, or a frame that says so
        read()
    assert answer.signature is None
