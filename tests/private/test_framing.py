"""A client of another maker at real sockets: it asks for Binary HTTP, and an observer sees no difference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from cloister.trust.sealing import (
    Fields,
    HttpRequest,
    HttpResponse,
    MessageError,
    RequestHead,
    ResponseOpener,
    decode_response,
)
from cloister.trust.shape import FRAMING_FIELD, TrafficShape, Unshaper
from tests.private.messages import post
from tests.sealed_cloud import LoopbackCloud, open_cloud

SHAPE = TrafficShape(frame_bytes=512, tick_s=0.004, constant=True)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """A stream of events under `/v1/stream` and `/v1/broken`, which breaks down in its middle, and JSON elsewhere."""
    is_stream = scope["path"] in ("/v1/stream", "/v1/broken")
    kind = b"text/event-stream" if is_stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for number in range(5 if is_stream else 0):
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"data: word %d\n\n" % number, "more_body": True})
        if scope["path"] == "/v1/broken":
            raise RuntimeError("the engine died")
    await send({"type": "http.response.body", "body": b"" if is_stream else b'{"whole": true}', "more_body": False})


@pytest.fixture(scope="module")
def cloud() -> Iterator[LoopbackCloud]:
    with open_cloud(answer, shape=SHAPE) as cloud:
        yield cloud


def ask(cloud: LoopbackCloud, path: str, framing: bytes | None) -> tuple[list[int], bytes]:
    """Sizes of the chunks that left the node, and what they say."""
    fields: Fields = () if framing is None else ((FRAMING_FIELD, framing),)
    sealed, _, inner = cloud.seal(HttpRequest(RequestHead("POST", "https", "localhost", path, fields)))
    assert post(cloud, sealed).status_code == 200
    node = cloud.node.posts()[-1]
    opener = ResponseOpener(inner)
    return [len(piece) for _, piece in node.pieces], b"".join([*opener.feed(node.response), opener.close()])


def unshape(said: bytes) -> HttpResponse:
    reader = Unshaper(required=True)
    message = reader.feed(said)
    reader.close()
    return decode_response(message)


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/whole", "/elsewhere"])
def test_both_framings_say_the_same_in_the_same_row_of_chunks(cloud: LoopbackCloud, path: str) -> None:
    our_sizes, ours = ask(cloud, path, None)
    their_sizes, theirs = ask(cloud, path, b"binary-http")
    assert our_sizes == their_sizes
    assert len(our_sizes) == 64
    mine, other = unshape(ours), decode_response(theirs)
    assert mine.head.status == other.head.status
    said = [[line for line in each.content.splitlines() if line and line[:1] != b":"] for each in (mine, other)]
    assert said[0] == said[1]
    assert said[0]


def test_an_answer_that_broke_down_looks_like_any_other_and_lacks_its_end(cloud: LoopbackCloud) -> None:
    sizes, said = ask(cloud, "/v1/broken", b"binary-http")
    assert sizes == ask(cloud, "/v1/stream", b"binary-http")[0]
    assert b"word 0" in said
    with pytest.raises(MessageError):
        decode_response(said)


def test_frames_are_what_a_client_gets_that_asks_for_them_or_for_nothing(cloud: LoopbackCloud) -> None:
    assert unshape(ask(cloud, "/v1/whole", b"frames")[1]).content == unshape(ask(cloud, "/v1/whole", None)[1]).content


def test_a_framing_that_there_is_not_is_refused_with_the_names_of_those_that_are(cloud: LoopbackCloud) -> None:
    response = unshape(ask(cloud, "/v1/whole", b"quic")[1])
    assert response.head.status == 400
    assert "one of frames, binary-http" in msgspec.json.decode(response.content)["title"]
