"""Requests and answers of the sealed cloud, sealed and opened by hand, so that a test can send what no client would."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from cloister.trust.sealing import (
    CHUNKED,
    ChunkOpener,
    Content,
    Header,
    HttpRequest,
    KeyConfiguration,
    KeyRing,
    MessageReader,
    OhttpContext,
    Part,
    ResponseHead,
    ResponseOpener,
    header_bytes,
    parse_keys,
)
from cloister.trust.sealing.hpke import set_up_receiver
from tests.sealed_cloud import LoopbackCloud

http = httpx.Client(verify=False, timeout=300, limits=httpx.Limits(max_keepalive_connections=0))
"""Does not read the system's certificates for each request, and keeps no connection."""


def open_again(ring: KeyRing, sealed: bytes, now: float) -> bytes:
    """What the holder of the keys reads in a sealed request, replay or not."""
    header = Header.parse(sealed)
    key = ring.find(header.key_id, now)
    assert key is not None
    opener = ChunkOpener(set_up_receiver(header.enc, key.private_key, header.suite, header.info(CHUNKED)))
    return b"".join(opener.feed(sealed[header_bytes(sealed) :])) + opener.close()


def known_to(cloud: LoopbackCloud, answer: bytes) -> dict[str, bytes]:
    """All that relay, gateway and the first node know of the last request, after each has opened what it has the key of.

    Args:
        answer: what the server inside wrote.
    """
    relay, gateway, node = (record.posts()[-1] for record in (cloud.relay, cloud.gateway, cloud.node))
    return {
        "relay": relay.everything,
        "gateway": gateway.everything + open_again(cloud.gateway_ring, gateway.request, cloud.now()) + node.everything,
        "node": node.everything + open_again(cloud.nodes["a"].ring, node.request, cloud.now()) + answer,
    }


class Opening:
    """Opens an answer while it arrives: outer chunks, the gateway's response, inner chunks, the node's response."""

    def __init__(self, outer: OhttpContext, inner: OhttpContext) -> None:
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


def post(
    cloud: LoopbackCloud, sealed: bytes, *, to: str | None = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Sends a sealed request to the relay (or elsewhere) and returns the whole reply."""
    fields = {"content-type": CHUNKED.request_type, **(headers or {})}
    return http.post(to or cloud.relay_url, content=sealed, headers=fields, timeout=300)


def ask(cloud: LoopbackCloud, request: HttpRequest, **options: object) -> Opening:
    """Sends a request and opens the whole answer."""
    sealed, outer, inner = cloud.seal(request, **options)  # type: ignore[arg-type]
    reply = post(cloud, sealed)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == CHUNKED.response_type
    opening = Opening(outer, inner)
    opening.feed(reply.content)
    opening.close()
    return opening


def gateway_keys(cloud: LoopbackCloud) -> KeyConfiguration:
    """The gateway's keys as a client gets them through the relay."""
    return parse_keys(http.get(f"{cloud.relay_url}/.well-known/ohttp-gateway").content)[0]
