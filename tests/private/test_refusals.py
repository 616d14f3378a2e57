"""What relay, gateway and node refuse: in which order, with which words, and alike where the difference would tell."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cloister.private.problems import DATE_TYPE, KEY_TYPE
from cloister.private.relay import RelayConfig, relay_app
from cloister.private.upstream import Upstream, check_url, trust_only
from cloister.trust.sealing import (
    CHUNKED,
    WHOLE,
    HttpRequest,
    HttpResponse,
    KeyConfiguration,
    ReplayCache,
    RequestHead,
    ResponseHead,
    decode_response,
    encode_request,
    encode_response,
    header_bytes,
    open_response,
    seal_chunked_request,
    seal_request,
)
from cloister.trust.tokens import authorization
from cloister.types.errors import ConfigError
from tests.loopback import serve
from tests.private.inner import ANSWER, Inner
from tests.private.messages import Opening, ask, http, post
from tests.sealed_cloud import NODE_SECRET, RELAY_SECRET, LoopbackCloud, open_cloud
from tests.server.test_tls import write_pair

REQUEST = HttpRequest(RequestHead("POST", "https", "localhost", "/v1/echo"), b"hello")
GATEWAY_HEADERS = {"authorization": f"Bearer {RELAY_SECRET}"}
NODE_HEADERS = {"authorization": f"Bearer {NODE_SECRET}"}
TOO_LARGE = 18 * 2**20


@pytest.fixture(scope="module")
def cloud() -> Iterator[LoopbackCloud]:
    with open_cloud(Inner()) as cloud:
        yield cloud


def refusal(cloud: LoopbackCloud, **options: object) -> tuple[int, str, dict[bytes, bytes]]:
    """Status, title and fields with which the gateway refused a request that it had opened."""
    opening = ask(cloud, REQUEST, **options)
    head = opening.gateway_head
    assert head is not None
    return head.status, opening.refusal.decode(), dict(head.fields)


Change = Callable[[bytes], bytes]
DAMAGES: dict[str, Change] = {
    "unknown key": lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:],
    "unknown cipher": lambda sealed: sealed[:5] + b"\x00\x09" + sealed[7:],
    "changed encapsulated key": lambda sealed: sealed[:20] + bytes([sealed[20] ^ 1]) + sealed[21:],
    "key of low order": lambda sealed: sealed[: header_bytes(sealed) - 32] + bytes(32) + sealed[header_bytes(sealed) :],
    "changed tag": lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
    "cut off": lambda sealed: sealed[:-1],
    "header only": lambda sealed: sealed[: header_bytes(sealed)],
    "half a header": lambda sealed: sealed[:20],
    "somebody else's": lambda sealed: seal_chunked_request(
        KeyConfiguration(sealed[0], X25519PrivateKey.generate().public_key().public_bytes_raw()), encode_request(REQUEST)
    )[0],
}


def bytes_of(reply: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    return reply.status_code, reply.content, sorted((k, v) for k, v in reply.headers.items() if k != "date")


def test_a_gateway_answers_whatever_it_cannot_open_with_the_same_bytes(cloud: LoopbackCloud) -> None:
    sealed, _, _ = cloud.seal(REQUEST)
    assert post(cloud, sealed).status_code == 200
    replies = {name: bytes_of(post(cloud, change(cloud.seal(REQUEST)[0]))) for name, change in DAMAGES.items()}
    replies["replay"] = bytes_of(post(cloud, sealed))
    status, body, _ = replies["replay"]
    assert (status, KEY_TYPE in body.decode()) == (400, True)
    assert set(map(str, replies.values())) == {str(replies["replay"])}


def test_a_node_answers_whatever_it_cannot_open_with_the_same_bytes(cloud: LoopbackCloud) -> None:
    node = cloud.nodes["a"]
    url = f"{node.url}/ohttp"
    sealed, _ = seal_chunked_request(node.ring.current.configuration, encode_request(REQUEST))
    assert post(cloud, sealed, to=url, headers=NODE_HEADERS).status_code == 200
    replies = {"replay": bytes_of(post(cloud, sealed, to=url, headers=NODE_HEADERS))}
    for name, change in DAMAGES.items():
        fresh, _ = seal_chunked_request(node.ring.current.configuration, encode_request(REQUEST))
        replies[name] = bytes_of(post(cloud, change(fresh), to=url, headers=NODE_HEADERS))
    assert replies["replay"][0] == 400
    assert set(map(str, replies.values())) == {str(replies["replay"])}


def test_a_late_chunk_that_does_not_open_is_answered_like_an_early_one(cloud: LoopbackCloud) -> None:
    early = bytes_of(post(cloud, DAMAGES["unknown key"](cloud.seal(REQUEST)[0])))
    large = HttpRequest(REQUEST.head, bytes(60_000))
    late = bytes_of(post(cloud, DAMAGES["changed tag"](cloud.seal(large)[0])))
    assert late == early


def test_sizes_come_first_then_the_relay_then_the_seal(cloud: LoopbackCloud) -> None:
    def status_of(content: bytes, headers: dict[str, str], length: int | None = None) -> int:
        fields = {"content-type": CHUNKED.request_type, **headers}
        if length is not None:  # declared and never sent: the answer comes without it
            with socket.create_connection(httpx.URL(cloud.gateway_url).netloc.decode().split(":")) as connection:
                lines = "".join(f"{name}: {value}\r\n" for name, value in {**fields, "content-length": str(length)}.items())
                connection.sendall(f"POST / HTTP/1.1\r\nhost: gateway\r\n{lines}\r\n".encode())
                return int(connection.recv(4096).split()[1])
        return http.post(cloud.gateway_url, content=content, headers=fields).status_code

    nonsense = b"nonsense"
    assert status_of(nonsense, {}, TOO_LARGE) == 413
    assert status_of(nonsense, {}) == 401
    assert status_of(nonsense, {"authorization": f"Bearer {RELAY_SECRET}x"}) == 401
    assert status_of(nonsense, {"authorization": f"Basic {RELAY_SECRET}"}) == 401
    assert status_of(nonsense, GATEWAY_HEADERS) == 400
    assert cloud.gateway.posts()[-1].status == 400


def test_a_request_that_does_not_say_its_length_is_cut_at_the_limit() -> None:
    with open_cloud(Inner(), max_request_bytes=100_000) as cloud:
        sealed, _, _ = cloud.seal(HttpRequest(REQUEST.head, bytes(200_000)))
        said = post(cloud, sealed)

        def pieces() -> Iterator[bytes]:
            yield from (sealed[start : start + 10_000] for start in range(0, len(sealed), 10_000))

        unsaid = http.post(cloud.relay_url, content=pieces(), headers={"content-type": CHUNKED.request_type})
        assert said.status_code == unsaid.status_code == 413
        assert said.content == unsaid.content
        assert all(len(seen.request) <= 100_000 for seen in cloud.node.posts())
        assert ask(cloud, REQUEST).content == ANSWER + b"hello"


def test_noise_without_an_end_is_not_kept(cloud: LoopbackCloud) -> None:
    headers = {**GATEWAY_HEADERS, "content-type": CHUNKED.request_type}
    reply = http.post(cloud.gateway_url, content=(bytes(65_536) for _ in range(100)), headers=headers)
    assert reply.status_code == 400
    assert len(cloud.gateway.posts()[-1].request) < 500_000, "the rest is thrown away as it comes"


def test_a_replay_does_not_cost_a_second_token_and_a_forged_one_does_not_reach_the_store(cloud: LoopbackCloud) -> None:
    token = authorization(cloud.buy(1)[0])
    first, _, _ = cloud.seal(REQUEST, token=token)
    assert post(cloud, first).status_code == 200
    assert post(cloud, first).status_code == 400, "a copy is not opened, from any sender"
    status, text, fields = refusal(cloud, token=token)
    assert (status, "spent" in text) == (401, True)
    assert fields[b"www-authenticate"].startswith(b"PrivateToken challenge=")


@pytest.mark.parametrize("token", ["", 'PrivateToken token="AAAA"', "Bearer sk-1234", 'PrivateToken token="%s"' % ("A" * 472)])
def test_without_a_good_token_nothing_reaches_a_node(cloud: LoopbackCloud, token: str) -> None:
    before = len(cloud.node.posts())
    status, text, fields = refusal(cloud, token=token)
    assert status == 401
    assert "send a token" in text
    assert b"www-authenticate" in fields
    assert len(cloud.node.posts()) == before


@pytest.mark.parametrize("skew_s", [-301, 301, 1e7])
def test_a_date_outside_of_five_minutes_is_refused_with_the_right_one(cloud: LoopbackCloud, skew_s: float) -> None:
    token = authorization(cloud.buy(1)[0])
    opening = ask(cloud, REQUEST, token=token, date_s=cloud.now() + skew_s)
    assert opening.gateway_head is not None
    fields = dict(opening.gateway_head.fields)
    assert opening.gateway_head.status == 400
    assert fields[b"content-type"] == b"application/problem+json"
    assert DATE_TYPE.encode() in opening.refusal
    right = parsedate_to_datetime(fields[b"date"].decode()).timestamp()
    assert right == int(cloud.now())
    again = ask(cloud, REQUEST, token=token, date_s=right)
    assert again.content == ANSWER + b"hello", "the token is not spent by a wrong clock"


def without(name: bytes) -> Callable[[RequestHead], RequestHead]:
    return lambda head: replace(head, fields=tuple(line for line in head.fields if line[0] != name))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (without(b"date"), 400),
        (lambda head: replace(head, fields=(*head.fields, (b"date", b"yesterday"))), 400),
        (lambda head: replace(head, authority="other.example"), 421),
        (lambda head: replace(head, path="/nodes/" + "0" * 64), 404),
        (lambda head: replace(head, path="/etc/passwd"), 404),
        (lambda head: replace(head, method="GET"), 404),
        (without(b"content-type"), 415),
        (lambda head: replace(head, fields=(*head.fields, (b"expect", b"100-continue"))), 417),
    ],
    ids=["no date", "two dates", "other gateway", "no such node", "other path", "GET", "no type", "expects 100"],
)
def test_a_target_that_is_none_is_refused_before_the_token_is_spent(
    cloud: LoopbackCloud, change: Callable[[RequestHead], RequestHead], status: int
) -> None:
    token = authorization(cloud.buy(1)[0])
    assert refusal(cloud, token=token, change_head=change)[0] == status
    assert ask(cloud, REQUEST, token=token).content == ANSWER + b"hello"


@pytest.mark.parametrize("authority", ["gateway.example:443", "Gateway.Example"])
def test_the_gateway_is_known_by_its_name_with_its_default_port_too(cloud: LoopbackCloud, authority: str) -> None:
    token = authorization(cloud.buy(1)[0])
    opening = ask(cloud, REQUEST, token=token, change_head=lambda head: replace(head, authority=authority))
    assert opening.content == ANSWER + b"hello"


def test_what_is_sealed_must_be_a_request(cloud: LoopbackCloud) -> None:
    keys = cloud.gateway_ring.current.configuration
    for message in (b"\x00\x03GET", encode_response(HttpResponse(ResponseHead(200)))):
        sealed, exchange = seal_chunked_request(keys, message)
        opening = Opening(exchange, exchange)
        opening.feed(post(cloud, sealed).content)
        opening.close()
        assert opening.gateway_head is not None
        assert opening.gateway_head.status == 400


def test_another_client_may_ask_in_the_form_that_is_not_chunked(cloud: LoopbackCloud) -> None:
    node = cloud.nodes["a"]
    inner, inner_exchange = seal_request(node.ring.current.configuration, encode_request(REQUEST))
    fields = (
        (b"authorization", authorization(cloud.buy(1)[0]).encode()),
        (b"content-type", WHOLE.request_type.encode()),
        (b"date", formatdate(cloud.now(), usegmt=True).encode()),
    )
    head = RequestHead("POST", "https", "gateway.example", f"/nodes/{node.node_id}", fields)
    outer, exchange = seal_request(cloud.gateway_ring.current.configuration, encode_request(HttpRequest(head, inner)))
    reply = http.post(cloud.relay_url, content=outer, headers={"content-type": WHOLE.request_type})
    assert (reply.status_code, reply.headers["content-type"]) == (200, WHOLE.response_type)
    response = decode_response(open_response(exchange, reply.content))
    assert response.head == ResponseHead(200, ((b"content-type", WHOLE.response_type.encode()),))
    answer = decode_response(open_response(inner_exchange, response.content))
    assert (answer.head.status, answer.content) == (200, ANSWER + b"hello")
    assert dict(answer.head.fields) == {b"content-type": b"text/plain", b"x-inner": b"yes"}, "no field of a connection"


def test_a_node_takes_requests_of_its_gateway_only_and_shows_nothing_else(cloud: LoopbackCloud) -> None:
    node = cloud.nodes["a"]
    sealed, _ = seal_chunked_request(node.ring.current.configuration, encode_request(REQUEST))
    assert post(cloud, sealed, to=f"{node.url}/ohttp").status_code == 401
    assert post(cloud, sealed, to=f"{node.url}/ohttp", headers={"authorization": "Bearer x"}).status_code == 401
    wrong_type = {**NODE_HEADERS, "content-type": "application/json"}
    assert http.post(f"{node.url}/ohttp", content=sealed, headers=wrong_type).status_code == 415
    for path in ("/v1/echo", "/v1/models", "/metrics", "/"):
        assert http.post(node.url + path, content=b"in the clear").status_code == 404
    assert http.get(f"{node.url}/ohttp").status_code == 405
    assert http.get(f"{node.url}/health").text == "well"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/", "/v2/echo"])
def test_only_the_api_can_be_asked_sealed(cloud: LoopbackCloud, path: str) -> None:
    opening = ask(cloud, HttpRequest(RequestHead("POST", "https", "localhost", path)))
    assert opening.head is not None
    assert opening.head.status == 404


def test_a_date_inside_is_held_against_the_nodes_clock(cloud: LoopbackCloud) -> None:
    old = replace(REQUEST.head, fields=((b"date", formatdate(cloud.now() - 400, usegmt=True).encode()),))
    opening = ask(cloud, HttpRequest(old, b"hello"))
    assert opening.head is not None
    assert opening.head.status == 400
    assert DATE_TYPE.encode() in opening.content


def test_a_gateway_that_could_not_recognise_copies_takes_no_more() -> None:
    with open_cloud(Inner()) as cloud:
        cloud.gateway_receiver._replays = ReplayCache(600, capacity=1)
        assert ask(cloud, REQUEST).content == ANSWER + b"hello"
        reply = post(cloud, cloud.seal(REQUEST)[0])
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")


def test_a_relay_takes_sealed_requests_and_public_files_and_nothing_else(cloud: LoopbackCloud) -> None:
    url = cloud.relay_url
    assert http.post(url, content=b"x", headers={"content-type": "application/json"}).status_code == 415
    assert http.get(url).status_code == 405
    assert http.post(f"{url}/v1/chat/completions").status_code == 404
    assert http.post(f"{url}/.well-known/ohttp-gateway").status_code == 405
    before = len(cloud.gateway.seen)
    for path in (
        "/.well-known/../secret",
        "/.well-known/a%2F..%2F..",
        "/.well-known//x",
        "/.well-known/a/.hidden",
        "/.well-known/",
    ):
        with socket.create_connection(httpx.URL(url).netloc.decode().split(":")) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: relay\r\n\r\n".encode())
            assert b" 404 " in connection.recv(4096).split(b"\r\n")[0]
    assert len(cloud.gateway.seen) == before
    assert http.get(f"{url}/health").json() == {"status": "ok"}
    assert http.get(f"{url}/.well-known/cloister/evidence/{'0' * 64}").status_code == 404


def test_a_gateway_that_is_away_or_does_not_know_the_relay_is_told_apart(cloud: LoopbackCloud) -> None:
    def ask_through(gateway_url: str, secret: str = RELAY_SECRET, timeout_s: float = 5.0) -> httpx.Response:
        with serve(relay_app(RelayConfig(gateway_url, secret), Upstream("gateway", timeout_s=timeout_s))) as relay:
            return post(cloud, cloud.seal(REQUEST)[0], to=relay)

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        away = ask_through(f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert (away.status_code, "cannot be reached" in away.text) == (502, True)
    stranger = ask_through(cloud.gateway_url, "x" * 40)
    assert (stranger.status_code, "does not know this relay" in stranger.text) == (502, True)
    assert "www-authenticate" not in stranger.headers
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = ask_through(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3)
    assert (slow.status_code, "did not answer in time" in slow.text) == (504, True)


def test_a_node_that_is_silent_or_away_is_told_apart_in_the_sealed_answer() -> None:
    with open_cloud(Inner(), answer_timeout_s=0.5) as cloud:
        opening = ask(cloud, HttpRequest(RequestHead("POST", "https", "localhost", "/v1/stream")))
        assert opening.gateway_head is not None
        assert (opening.gateway_head.status, b"did not answer in time" in opening.refusal) == (504, True)
    with open_cloud(Inner(), num_nodes=2) as cloud:
        cloud.network.shut(cloud.nodes["a"].url)
        status, text, _ = refusal(cloud)
        assert (status, "cannot be reached" in text) == (502, True)
        assert ask(cloud, REQUEST, node=cloud.nodes["b"]).content == ANSWER + b"hello", "the others go on"


@pytest.mark.parametrize(
    "url", ["gateway.example", "ftp://gateway.example", "http://", "http://a?b", "http://u:p@a", "http://[", ""]
)
def test_an_address_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as"):
        check_url(url, "gateway")
    assert check_url("https://gateway.example/", "gateway") == "https://gateway.example"


def test_a_gateway_behind_tls_is_reached_only_if_its_authority_is_trusted(tmp_path: Path) -> None:
    certificate, (other, _) = write_pair(tmp_path), write_pair(tmp_path, "other")
    with open_cloud(Inner(), certificate=certificate) as cloud:
        assert cloud.gateway_url.startswith("https://")
        assert ask(cloud, REQUEST).content == ANSWER + b"hello"
        way = Upstream("gateway", tls=trust_only(other))
        with serve(relay_app(RelayConfig(cloud.gateway_url, RELAY_SECRET), way)) as relay:
            reply = post(cloud, cloud.seal(REQUEST)[0], to=relay)
    assert (reply.status_code, "cannot be reached" in reply.text) == (502, True)
