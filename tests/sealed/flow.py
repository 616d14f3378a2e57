"""Relay, gateway and nodes at loopback sockets, each in a thread of its own, and a record of what each of them saw."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

import httpx
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.privacy.sealing import (
    CHUNKED,
    GATEWAY_KEY_LIFE_S,
    GATEWAY_KEY_OVERLAP_S,
    NODE_KEY_LIFE_S,
    ChunkOpener,
    Content,
    Exchange,
    Header,
    HttpRequest,
    KeyConfiguration,
    KeyRing,
    MessageReader,
    Part,
    Receiver,
    ReplayCache,
    RequestHead,
    ResponseHead,
    ResponseOpener,
    bucket_bytes,
    encode_request,
    header_bytes,
    parse_keys,
    seal_chunked_request,
)
from cloister.privacy.sealing.hpke import set_up_receiver
from cloister.privacy.shape import TrafficShape
from cloister.privacy.tokens import Redeemer, authorization, open_spend_store
from cloister.sealed.dates import REPLAY_WINDOW_S
from cloister.sealed.exchange import MAX_REQUEST_BYTES
from cloister.sealed.gateway import GatewayConfig, gateway_app
from cloister.sealed.node import NodeConfig, node_app
from cloister.sealed.nodes import NodeBook
from cloister.sealed.relay import ISSUER_TIMEOUT_S, RelayConfig, relay_app
from cloister.sealed.serving import Lifespan
from cloister.sealed.unsealing import LocalUnsealer
from cloister.sealed.upstream import Upstream, trust_only
from cloister.server.body_budget import BODY_CEILING_BYTES
from cloister.server.connection import Connection
from cloister.server.serve import address_of, bind
from tests.token_shop import CHALLENGE, Shop

GATEWAY_URL = f"https://{CHALLENGE.origin_info[0]}"
http = httpx.Client(verify=False, timeout=20, limits=httpx.Limits(max_keepalive_connections=0))
"""Does not read the system's certificates for each request, and keeps no connection."""
RELAY_SECRET = "relay-" + "0" * 40
NODE_SECRET = "gateway-" + "1" * 40


@dataclass
class Seen:
    """One request as a program saw it.

    Attributes:
        client: address and port of whoever connected.
        request, response: every byte of the bodies.
        pieces: the response's body as it was sent, with the time of each piece.
    """

    client: tuple[str, int]
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    request: bytes = b""
    status: int = 0
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False

    @property
    def response(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def everything(self) -> bytes:
        """All that went in or out, heads included."""
        lines = [name + b": " + value for name, value in (*self.headers, *self.response_headers)]
        return b"\n".join([repr(self.client).encode(), self.path.encode(), *lines, self.request, self.response])


class Recorder:
    """Writes down what an application is given and what it answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.seen: list[Seen] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = Seen(tuple(scope["client"]), scope["method"], scope["path"], list(scope["headers"]))
        self.seen.append(seen)

        async def record_receive() -> Message:
            message = await receive()
            seen.request += message.get("body", b"")
            return message

        async def record_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status, seen.response_headers = message["status"], list(message["headers"])
            else:
                seen.pieces.append((time.monotonic(), message.get("body", b"")))
                seen.is_whole = not message.get("more_body", False)
            await send(message)

        await self._app(scope, record_receive, record_send)

    def posts(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]


@contextlib.contextmanager
def serve(app: ASGIApp, certificate: tuple[Path, Path] | None = None) -> Iterator[str]:
    """Serves an application at a loopback socket and yields its URL; with TLS if there is a certificate and its key."""
    cert, key = certificate or (None, None)
    with bind("127.0.0.1", 0) as listener:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            timeout_graceful_shutdown=2,
            server_header=False,
            ssl_certfile=cert,
            ssl_keyfile=key,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        give_up_s = time.monotonic() + 10
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < give_up_s, "the server did not start in time"
            time.sleep(0.005)
        try:
            yield address_of(listener, has_tls=certificate is not None)
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive(), "the server did not stop"


@dataclass
class Node:
    """A node that serves.

    Attributes:
        receiver: its keys.
        stop: ends it, as a machine that is switched off.
    """

    url: str
    record: Recorder
    receiver: Receiver
    stop: Callable[[], None]

    @property
    def configuration(self) -> KeyConfiguration:
        return self.receiver.ring.current.configuration

    @property
    def node_id(self) -> str:
        return hashlib.sha256(self.receiver.ring.publish()).hexdigest()


@dataclass
class Cloud:
    """The programs, and a client's purse.

    Attributes:
        shop: sells tokens that the gateway takes.
        gateway_receiver: the gateway's keys.
        now: what gateway and nodes hold dates against, in Unix seconds; may be set.
    """

    relay_url: str
    gateway_url: str
    nodes: list[Node]
    relay: Recorder
    gateway: Recorder
    gateway_receiver: Receiver
    book: NodeBook
    shop: Shop
    clock: Callable[[], float]
    issuer_url: str = ""

    def letter(
        self,
        request: HttpRequest,
        *,
        node: Node | None = None,
        token: str | None = None,
        date_s: float | None = None,
        change_inner: Callable[[bytes], bytes] = lambda sealed: sealed,
        change_head: Callable[[RequestHead], RequestHead] = lambda head: head,
    ) -> tuple[bytes, Exchange, Exchange]:
        """A request, sealed twice as clients do it; and what opens the answer, the gateway's part first."""
        node = node or self.nodes[0]
        message = encode_request(request)
        inner, inner_exchange = seal_chunked_request(node.configuration, message.ljust(bucket_bytes(len(message)), b"\0"))
        token = authorization(self.shop.buy(1)[0]) if token is None else token
        date = formatdate(self.clock() if date_s is None else date_s, usegmt=True)
        fields = (
            (b"authorization", token.encode()),
            (b"content-type", CHUNKED.request_type.encode()),
            (b"date", date.encode()),
        )
        head = change_head(RequestHead("POST", "https", CHALLENGE.origin_info[0], f"/nodes/{node.node_id}", fields))
        gateway_keys = self.gateway_receiver.ring.current.configuration
        outer, outer_exchange = seal_chunked_request(gateway_keys, encode_request(HttpRequest(head, change_inner(inner))))
        return outer, outer_exchange, inner_exchange


@contextlib.contextmanager
def open_cloud(
    directory: Path,
    inner: ASGIApp,
    *,
    num_nodes: int = 1,
    shape: TrafficShape | None = None,
    evidence: Callable[[], bytes | None] = lambda: None,
    answer_timeout_s: float = 600.0,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    body_ceiling_bytes: int = BODY_CEILING_BYTES,
    budget: int = 512,
    certificate: tuple[Path, Path] | None = None,
    issuer: ASGIApp | None = None,
    issuer_timeout_s: float = ISSUER_TIMEOUT_S,
) -> Iterator[Cloud]:
    """Starts a relay, a gateway and nodes around `inner`, and a shop of tokens that pay for `budget` output tokens.

    Args:
        issuer: what the relay carries purchases to; None carries none.
    """
    with contextlib.ExitStack() as stack:
        shop = Shop(directory, budget=budget)
        stack.callback(shop.close)
        nodes = []
        for _ in range(num_nodes):
            receiver = Receiver(KeyRing(time.monotonic()), ReplayCache(NODE_KEY_LIFE_S))
            config = NodeConfig(shape=shape, gateway_secret=NODE_SECRET, evidence=evidence)
            record = Recorder(node_app(inner, config, LocalUnsealer(receiver), Lifespan(None), now=shop.clock))
            site = stack.enter_context(contextlib.ExitStack())
            nodes.append(Node(site.enter_context(serve(record)), record, receiver, site.close))
        ring = KeyRing(time.monotonic(), life_s=GATEWAY_KEY_LIFE_S, overlap_s=GATEWAY_KEY_OVERLAP_S)
        gateway_receiver = Receiver(ring, ReplayCache(REPLAY_WINDOW_S))
        upstream = Upstream("node", timeout_s=answer_timeout_s)
        book = NodeBook([node.url for node in nodes], upstream)
        store = open_spend_store(shop.store_url)
        stack.callback(store.close)
        gateway = Recorder(
            gateway_app(
                GatewayConfig(
                    GATEWAY_URL, (RELAY_SECRET,), NODE_SECRET, max_request_bytes, body_ceiling_bytes=body_ceiling_bytes
                ),
                LocalUnsealer(gateway_receiver),
                Redeemer(shop.accepted(), store, shop.clock),
                book,
                upstream,
                Lifespan(upstream, book.look_forever),
                now=shop.clock,
            )
        )
        gateway_url = stack.enter_context(serve(gateway, certificate)).replace("127.0.0.1", "localhost")
        way = Upstream("gateway", tls=trust_only(certificate[0] if certificate else None), timeout_s=answer_timeout_s + 10)
        issuer_url = stack.enter_context(serve(issuer)) if issuer else ""
        way_to_issuer = Upstream("issuer", timeout_s=issuer_timeout_s) if issuer else None
        relay = Recorder(relay_app(RelayConfig(gateway_url, RELAY_SECRET, issuer_url=issuer_url), way, way_to_issuer))
        relay_url = stack.enter_context(serve(relay))
        yield Cloud(relay_url, gateway_url, nodes, relay, gateway, gateway_receiver, book, shop, shop.clock, issuer_url)


def open_again(receiver: Receiver, sealed: bytes) -> bytes:
    """What the holder of the keys reads in a sealed request, replay or not."""
    header = Header.parse(sealed)
    key = receiver.ring.find(header.key_id, time.monotonic())
    assert key is not None
    opener = ChunkOpener(set_up_receiver(header.enc, key.private_key, header.suite, header.info(CHUNKED)))
    return b"".join(opener.feed(sealed[header_bytes(sealed) :])) + opener.close()


def known_to(cloud: Cloud, answer: bytes) -> dict[str, bytes]:
    """All that relay, gateway and the first node know of the last request, after each has opened what it has the key of.

    Args:
        answer: what the server inside wrote.
    """
    relay, gateway, node = cloud.relay.posts()[-1], cloud.gateway.posts()[-1], cloud.nodes[0].record.posts()[-1]
    return {
        "relay": relay.everything,
        "gateway": gateway.everything + open_again(cloud.gateway_receiver, gateway.request) + node.everything,
        "node": node.everything + open_again(cloud.nodes[0].receiver, node.request) + answer,
    }


class Opening:
    """Opens an answer while it arrives: outer chunks, the gateway's response, inner chunks, the node's response."""

    def __init__(self, outer: Exchange, inner: Exchange) -> None:
        self._outer, self._inner = ResponseOpener(outer), ResponseOpener(inner)
        self._outer_reader, self._inner_reader = MessageReader(), MessageReader()
        self.gateway_head: ResponseHead | None = None
        self.refusal = b""
        self.head: ResponseHead | None = None
        self.content = b""
        self.num_flushes = 0

    def feed(self, data: bytes) -> None:
        for plain in self._outer.feed(data):
            self._take(self._outer_reader.feed(plain))

    def close(self) -> None:
        self._take(self._outer_reader.feed(self._outer.close()))
        self._take(self._outer_reader.close())
        if self.gateway_head is not None and self.gateway_head.status == 200:
            self._take_inner(self._inner_reader.feed(self._inner.close()))
            self._take_inner(self._inner_reader.close())

    def _take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, ResponseHead):
                self.gateway_head = part
            elif isinstance(part, Content):
                if self.gateway_head is not None and self.gateway_head.status != 200:
                    self.refusal += part.data
                    continue
                for plain in self._inner.feed(part.data):
                    self.num_flushes += 1
                    self._take_inner(self._inner_reader.feed(plain))

    def _take_inner(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, ResponseHead):
                self.head = part
            elif isinstance(part, Content):
                self.content += part.data


def post(cloud: Cloud, sealed: bytes, *, to: str | None = None, headers: dict[str, str] | None = None) -> httpx.Response:
    """Sends a sealed request to the relay (or elsewhere) and returns the whole reply."""
    fields = {"content-type": CHUNKED.request_type, **(headers or {})}
    return http.post(to or cloud.relay_url, content=sealed, headers=fields, timeout=20)


def ask(cloud: Cloud, request: HttpRequest, **options: object) -> Opening:
    """Sends a request and opens the whole answer."""
    sealed, outer, inner = cloud.letter(request, **options)  # type: ignore[arg-type]
    reply = post(cloud, sealed)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == CHUNKED.response_type
    opening = Opening(outer, inner)
    opening.feed(reply.content)
    opening.close()
    return opening


def gateway_keys(cloud: Cloud) -> KeyConfiguration:
    """The gateway's keys as a client gets them through the relay."""
    return parse_keys(http.get(f"{cloud.relay_url}/.well-known/ohttp-gateway").content)[0]
