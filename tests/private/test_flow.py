"""What relay, gateway and node see of a request, byte for byte: the promises of the whole, on real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from cloister.trust.sealing import CHUNKED, XWING, HttpRequest, RequestHead, UnsealError, bucket_bytes
from cloister.trust.tokens import authorization
from tests.private.inner import ANSWER, Inner
from tests.private.messages import Opening, ask, gateway_keys, http, known_to
from tests.sealed_cloud import LoopbackCloud, open_cloud

PROMPT = b"my symptoms are none of the operator's business"


@pytest.fixture(scope="module")
def inner() -> Inner:
    return Inner()


@pytest.fixture(scope="module")
def cloud(inner: Inner) -> Iterator[LoopbackCloud]:
    with open_cloud(inner, num_nodes=2) as cloud:
        yield cloud


def request(path: str = "/v1/echo", content: bytes = PROMPT) -> HttpRequest:
    return HttpRequest(RequestHead("POST", "https", "localhost", path, ((b"content-type", b"application/json"),)), content)


def test_the_node_alone_sees_content_and_nobody_but_the_relay_an_address(cloud: LoopbackCloud, inner: Inner) -> None:
    token = authorization(cloud.buy(1)[0])
    sealed, outer, sealed_inner = cloud.seal(request("/v1/echo?secret=query"), token=token)
    with httpx.Client() as client:
        reply = client.post(cloud.relay_url, content=sealed, headers={"content-type": CHUNKED.request_type, "x-user": "ann"})
        network = reply.extensions["network_stream"].get_extra_info("socket").getsockname()
    opening = Opening(outer, sealed_inner)
    opening.feed(reply.content)
    opening.close()
    assert opening.content == ANSWER + PROMPT

    relay, gateway, node = cloud.relay.posts()[-1], cloud.gateway.posts()[-1], cloud.node.posts()[-1]
    contents = (PROMPT, ANSWER, b"/v1/echo", b"secret=query", b"application/json")
    token_text = token.partition('"')[2].rstrip('"').encode()
    for seen in (relay, gateway, node):
        assert not any(content in seen.everything for content in contents), "content travels sealed"
        assert token_text not in seen.everything, "and so does the token"
    known = known_to(cloud, opening.content)
    assert not any(content in known[name] for content in contents for name in ("relay", "gateway")), "opened or not"
    assert all(content in known["node"] for content in contents)
    assert [name for name, seen in known.items() if token_text in seen] == ["gateway"]
    assert [name for name, seen in known.items() if cloud.nodes["a"].node_id.encode() in seen] == ["gateway"]
    assert [name for name, seen in known.items() if b"%d" % network[1] in seen] == ["relay"]
    # the relay: an address, a length, no name of a node
    assert relay.client == tuple(network)
    assert cloud.nodes["a"].node_id.encode() not in relay.everything
    # the gateway: the relay's bytes, and not the address that they came from
    assert gateway.request == relay.request == sealed
    assert str(network[1]).encode() not in gateway.everything
    assert {name for name, _ in gateway.headers} == {
        b"host",
        b"content-type",
        b"content-length",
        b"authorization",
        b"incremental",
    }
    # the node: only what the client sealed to it, over a connection of the gateway
    assert node.request not in gateway.request
    expected = {b"host", b"content-type", b"authorization", b"transfer-encoding", b"cloister-token-budget"}
    assert {name for name, _ in node.headers} == expected
    assert dict(node.headers)[b"cloister-token-budget"] == b"512", "the same for every token of the issuer's key"
    assert inner.clients[-1] is None
    method, path, query, headers, body = inner.seen[-1]
    assert (method, path, query, body) == ("POST", "/v1/echo", b"secret=query", PROMPT)
    assert sorted(headers) == sorted(
        [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(PROMPT)), (b"host", b"localhost")]
    )


def test_requests_of_one_bucket_have_one_length_wherever_they_are_seen(cloud: LoopbackCloud) -> None:
    for content in (b"x", b"x" * 700):
        ask(cloud, request(content=content))
    short, long = cloud.relay.posts()[-2:]
    assert len(short.request) == len(long.request)
    assert [len(seen.request) for seen in cloud.node.posts()[-2:]] == [7 + XWING.enc_bytes + 1 + 1024 + 16] * 2
    assert bucket_bytes(1024) == 1024


def test_the_client_names_the_node_and_nobody_else_gets_the_request(cloud: LoopbackCloud) -> None:
    before = [len(cloud.record_of(name).posts()) for name in cloud.nodes]
    ask(cloud, request(), node=cloud.nodes["b"])
    assert [len(cloud.record_of(name).posts()) for name in cloud.nodes] == [before[0], before[1] + 1]


def test_a_status_of_the_server_inside_is_sealed_too(cloud: LoopbackCloud) -> None:
    opening = ask(cloud, request("/v1/teapot"))
    assert opening.head is not None
    assert opening.head.status == 418
    assert [seen.posts()[-1].status for seen in (cloud.relay, cloud.gateway, cloud.node)] == [200, 200, 200]


def test_the_first_piece_of_an_answer_arrives_while_the_last_is_not_yet_written(cloud: LoopbackCloud, inner: Inner) -> None:
    sealed, outer, sealed_inner = cloud.seal(request("/v1/stream"))
    opening = Opening(outer, sealed_inner)
    headers = {"content-type": CHUNKED.request_type}
    inner.go.release()
    with http.stream("POST", cloud.relay_url, content=sealed, headers=headers) as reply:
        arriving = reply.iter_raw()
        for expected in (b"piece 0;", b"piece 0;piece 1;", b"piece 0;piece 1;piece 2;"):
            while opening.content != expected:
                opening.feed(next(arriving))  # a way that keeps pieces back would wait here until the time-out
            inner.go.release()
        for data in arriving:
            opening.feed(data)
        opening.close()
    assert opening.content == b"piece 0;piece 1;piece 2;"


def test_a_request_is_carried_on_while_it_is_still_being_sent(cloud: LoopbackCloud) -> None:
    sealed, outer, sealed_inner = cloud.seal(request(content=bytes(60_000)))
    received = threading.Event()
    num_before = len(cloud.node.posts())

    def pieces() -> Iterator[bytes]:
        yield sealed[:40_000]
        assert received.wait(300), "the gateway waits for the whole request"
        yield sealed[40_000:]

    def watch() -> None:
        while len(cloud.node.posts()) == num_before or not cloud.node.posts()[-1].request:
            if received.wait(0.005):
                return
        received.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    reply = http.post(cloud.relay_url, content=pieces(), headers={"content-type": CHUNKED.request_type}, timeout=300)
    watcher.join()
    opening = Opening(outer, sealed_inner)
    opening.feed(reply.content)
    opening.close()
    assert opening.content == ANSWER + bytes(60_000)


def test_who_hangs_up_cancels_the_request_on_the_node(cloud: LoopbackCloud, inner: Inner) -> None:
    inner.started.clear()
    inner.cancelled.clear()
    sealed, _, _ = cloud.seal(request("/v1/stream"))
    headers = {"content-type": CHUNKED.request_type}
    inner.go.release()
    with http.stream("POST", cloud.relay_url, content=sealed, headers=headers) as reply:
        pieces = reply.iter_raw()  # which closes the connection when it is forgotten
        next(pieces)
        assert inner.started.is_set()
        assert not inner.cancelled.is_set()
    assert inner.cancelled.wait(300), "the node goes on computing for nobody"


@pytest.mark.parametrize("path", ["/v1/break", "/v1/leave"])
def test_a_failure_after_the_status_breaks_off_without_a_final_chunk(cloud: LoopbackCloud, path: str) -> None:
    sealed, outer, sealed_inner = cloud.seal(request(path))
    opening = Opening(outer, sealed_inner)
    headers = {"content-type": CHUNKED.request_type}

    def read() -> None:
        with http.stream("POST", cloud.relay_url, content=sealed, headers=headers, timeout=300) as reply:
            for data in reply.iter_raw():
                opening.feed(data)

    with pytest.raises(httpx.RemoteProtocolError):
        read()
    assert opening.content == b"a beginning"
    with pytest.raises(UnsealError):
        opening.close()
    assert not any(seen.posts()[-1].is_whole for seen in (cloud.relay, cloud.gateway, cloud.node))


def test_what_an_application_says_when_it_fails_is_written_nowhere(
    cloud: LoopbackCloud, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    opening = ask(cloud, request("/v1/fail"))
    assert opening.head is not None
    assert opening.head.status == 500
    assert PROMPT not in opening.content
    written = caplog.text + "".join(capfd.readouterr())
    assert "RuntimeError" in written
    assert PROMPT.decode() not in written


def test_keys_come_through_the_relay(cloud: LoopbackCloud) -> None:
    assert gateway_keys(cloud) == cloud.gateway_ring.current.configuration
    reply = http.get(f"{cloud.relay_url}/.well-known/ohttp-gateway", headers={"x-user": "ann"})
    assert reply.headers["content-type"] == "application/ohttp-keys"
    assert {name for name, _ in cloud.gateway.seen[-1].headers} == {b"host"}


def test_an_answer_that_was_refused_by_the_node_says_so_without_its_bytes(cloud: LoopbackCloud) -> None:
    opening = ask(cloud, request(), change_inner=lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert opening.gateway_head is not None
    assert opening.gateway_head.status == 502
    assert "refused the request (400)" in json.loads(opening.refusal)["title"]
