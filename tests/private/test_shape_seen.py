"""What a relay can tell of answers of a constant shape: nothing by which one differs from another, not even a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send

from cloister.trust.sealing import HttpRequest, RequestHead, ResponseOpener
from cloister.trust.shape import ShapeError, TrafficShape, Unshaper
from tests.loopback import Seen
from tests.private.messages import post
from tests.sealed_cloud import LoopbackCloud, open_cloud

SHAPE = TrafficShape(frame_bytes=512, tick_s=0.004, constant=True)
ANSWERS = ("short", "long", "slow", "late", "whole", "refused", "broken", "missing")


def has_begun() -> bool:
    """Whether ten frames of the last answer have left; set with the cloud."""
    raise AssertionError


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers by path, as a server might."""
    kind = scope["path"].rpartition("/")[2]
    if kind == "broken":
        raise RuntimeError("the engine died")
    while kind == "late" and not has_begun():
        await asyncio.sleep(0.001)
    await send({"type": "http.response.start", "status": 400 if kind == "refused" else 200, "headers": []})
    for number in range({"short": 1, "long": 40, "slow": 4}.get(kind, 0)):
        await asyncio.sleep(0.02 if kind == "slow" else 0)
        await send({"type": "http.response.body", "body": b"data: %d\n\n" % 10 ** (number % 9), "more_body": True})
    await send({"type": "http.response.body", "body": b"x" * (5000 if kind == "whole" else 9), "more_body": False})


@pytest.fixture(scope="module")
def cloud() -> Iterator[LoopbackCloud]:
    global has_begun
    with open_cloud(answer, shape=SHAPE) as cloud:
        has_begun = lambda: len(cloud.node.posts()[-1].pieces) >= 10  # noqa: E731
        yield cloud


def see(cloud: LoopbackCloud, kind: str) -> tuple[Seen, Seen]:
    """What the node sent and what the relay sent on for one answer."""
    path = f"/v1/{kind}" if kind != "missing" else "/elsewhere"
    sealed, *_ = cloud.seal(HttpRequest(RequestHead("POST", "https", "localhost", path)))
    assert post(cloud, sealed).status_code == 200
    return cloud.node.posts()[-1], cloud.relay.posts()[-1]


def sizes(seen: Seen) -> list[int]:
    return [len(piece) for _, piece in seen.pieces]


def test_every_answer_has_the_same_row_of_chunks(cloud: LoopbackCloud) -> None:
    seen = {kind: see(cloud, kind) for kind in ANSWERS}
    assert {len(sizes(node)) for node, _ in seen.values()} == {64}
    assert len({tuple(sizes(node)) for node, _ in seen.values()}) == 1
    assert all(node.is_whole and relay.is_whole for node, relay in seen.values())
    # The gateway seals what it reads: two chunks that came at once may go on as one, which saves a tag and two lengths.
    totals = [sum(sizes(relay)) for _, relay in seen.values()]
    assert max(totals) - min(totals) < 64 * 24


def test_frames_leave_before_there_is_a_word(cloud: LoopbackCloud) -> None:
    # The server says nothing before ten frames have left; were they to wait for it, the request would end without an answer.
    node, _ = see(cloud, "late")
    assert len(sizes(node)) == 64


def test_the_client_alone_is_told_that_the_node_failed(cloud: LoopbackCloud) -> None:
    async def break_down(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a beginning", "more_body": True})
        raise RuntimeError("the engine died")

    with open_cloud(break_down, shape=SHAPE) as other:
        sealed, _, inner = other.seal(HttpRequest(RequestHead("POST", "https", "localhost", "/v1/x")))
        assert post(other, sealed).status_code == 200
        node = other.node.posts()[-1]
    assert sizes(node) == sizes(see(cloud, "short")[0])
    opener, reader = ResponseOpener(inner), Unshaper(required=True)
    said = b"".join(map(reader.feed, opener.feed(node.response))) + reader.feed(opener.close())
    assert b"a beginning" in said
    with pytest.raises(ShapeError, match="node failed"):
        reader.close()
