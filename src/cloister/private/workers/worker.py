"""The application of a worker, built in the zygote before any request arrives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message

from cloister.cluster.sealed_unit import connect_engines, count_engines
from cloister.engine import SealedWorkerTransport
from cloister.engine.kv_unit import endpoint_of
from cloister.models.image_processing import open_image_processor
from cloister.policy import Gate, Policy, read_credentials
from cloister.private.gateway import NODE_PATH
from cloister.private.node import NodeConfig, node_app
from cloister.private.serving import Lifespan
from cloister.private.unsealing import LocalUnsealer
from cloister.private.workers.channel_broker import ChannelSource
from cloister.private.workers.image_decoder import ForkedDecoder
from cloister.private.workers.key_service_client import RemoteUnsealer
from cloister.private.workers.wire import BodyPiece, Gone, Head, frame, from_asgi, receive_for_worker, to_scope
from cloister.private.workers.zygote import WAITING_WORKERS, ZygoteBoot
from cloister.server.app import create_app
from cloister.server.unread_replies import MIB
from cloister.text import ChatTemplate, Tokenizer
from cloister.trust import hardening
from cloister.trust.sealing import (
    CHUNKED,
    NODE_KEY_LIFE_S,
    HttpRequest,
    KeyConfiguration,
    KeyRing,
    Receiver,
    ReplayCache,
    RequestHead,
    bucket_bytes,
    encode_request,
    seal_chunked_request,
)
from cloister.types.images import has_pillow

_LIMIT_BYTES = 2**20
LEAST_UNREAD_BYTES: Final = 6 * MIB
"""Some 60,000 packed tokens of a stream, or 12,000 with 20 log-probabilities each, beyond what the sockets on the way take. A
worker can run for each sequence of the engines, so a larger floor would leave the limit of all of them without meaning."""
_REHEARSED = (
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'),
    ("/v1/completions", b'{"prompt": "Hello", "max_tokens": 4, "stream": true}'),
    ("/v1/embeddings", b'{"input": "Hello"}'),
    ("/v1/rerank", b'{"query": "Hello", "documents": ["Hello"]}'),
    ("/v1/chat/completions", b'{"messages": 1}'),
)
"""Warm-up requests, sealed to a temporary key; those that need the engine fail, because it is not connected yet."""


class NodeServing:
    """Serves one exchange on the application of a node.

    Args:
        node: opens and seals (`private.node.node_app`).
        link: gives the node what it gets channels to its engines from.
        rehearsal: the same node with a temporary key, whose configuration is `configuration`; dropped after the warm-up.
        close: locks down this process once everything is loaded.
        decoder: decodes the images of a request; None for a model that takes none.
    """

    def __init__(
        self,
        node: ASGIApp,
        link: Callable[[ChannelSource], Awaitable[None]],
        unsealer: RemoteUnsealer,
        rehearsal: ASGIApp,
        configuration: KeyConfiguration,
        close: Callable[[], None],
        decoder: ForkedDecoder | None = None,
    ) -> None:
        self._node = node
        self._link = link
        self._unsealer = unsealer
        self._rehearsal: tuple[ASGIApp, KeyConfiguration] | None = (rehearsal, configuration)
        self.close = close
        self._decoder = decoder

    async def warm_up(self) -> None:
        assert self._rehearsal is not None
        app, configuration = self._rehearsal
        for path, body in _REHEARSED:
            head = RequestHead("POST", "https", "localhost", path, ((b"content-type", b"application/json"),))
            message = encode_request(HttpRequest(head, body))
            sealed, _ = seal_chunked_request(configuration, message.ljust(bucket_bytes(len(message)), b"\0"))
            messages: list[Message] = [{"type": "http.request", "body": sealed, "more_body": False}]

            async def receive(messages: list[Message] = messages) -> Message:
                return messages.pop() if messages else await _never()

            async def send(message: Message) -> None:
                pass

            await app(to_scope(Head("POST", NODE_PATH, [(b"content-type", CHUNKED.request_type.encode())])), receive, send)
        self._rehearsal = None

    async def serve(self, front: socket.socket, broker: socket.socket, key_service: socket.socket) -> None:
        if self._decoder is not None:
            self._decoder.fork()  # before there is anything of the request here
        reader, writer = await asyncio.open_unix_connection(sock=front, limit=_LIMIT_BYTES)
        await self._link(ChannelSource(broker))
        self._unsealer.attach(key_service)
        head = await receive_for_worker(reader)
        if not isinstance(head, Head):
            return

        async def receive() -> Message:
            match await receive_for_worker(reader):
                case BodyPiece(body, more):
                    return {"type": "http.request", "body": body, "more_body": more}
                case Gone() | None | _:
                    return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            writer.write(frame(from_asgi(message)))
            await writer.drain()

        await self._node(to_scope(head), receive, send)
        writer.close()
        await writer.wait_closed()


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets was set")


WORKER_PACKAGES: Final = tuple(
    f"cloister.{name}" for name in ("server", "private", "trust", "policy", "engine", "text", "types")
)
LATE_MODULES: Final = ("anyio._backends._asyncio", "pydantic._internal._dataclasses", "llguidance")
NOWHERE: Final = "sealed"
"""Placeholder for the address: workers have none, and a sealed request has no Host header to check."""


def build_worker(boot: ZygoteBoot) -> NodeServing:
    """Returns the worker's handler.

    Raises:
        ConfigError: the API key file cannot be used.
    """
    keys = boot.server.api_keys
    gate = Gate(
        Policy(str(boot.engine.profile)),
        read_credentials(Path(keys).expanduser()) if keys is not None else None,
        loopback=False,
        reuses_prefixes=bool(boot.engine.prefix_cache),
        sealed=True,
    )
    unsealer, transports = RemoteUnsealer(), list(_make_transports(boot))
    engine = connect_engines(transports, boot.engine, boot.server)
    path = Path(boot.ready.model.path)
    tokenizer = Tokenizer(path, remembers=False)
    server = replace(boot.server, host=NOWHERE, page=False, log_requests=False, otlp_endpoint=None, allowed_origins=None)
    decoder = _make_decoder(path) if gate.policy.allows("image-inputs") else None
    inner = create_app(
        engine,
        tokenizer,
        ChatTemplate.load(path, tokenizer.special),
        gate,
        server,
        request_timeout_s=boot.engine.request_timeout_s,
        open_decoding=decoder.open if decoder is not None else None,
    )

    async def link(channels: ChannelSource) -> None:
        for index, transport in enumerate(transports):
            transport.attach(partial(channels.open, index))
        await engine.start()

    config = NodeConfig(shape=boot.shape, profile=str(boot.engine.profile), unread_bytes=_share_unread(boot))
    node = node_app(inner, config, unsealer, Lifespan(None))
    receiver = Receiver(KeyRing(0.0), ReplayCache(NODE_KEY_LIFE_S))
    rehearsal = node_app(inner, config, LocalUnsealer(receiver, lambda: 0.0), Lifespan(None))
    return NodeServing(node, link, unsealer, rehearsal, receiver.ring.current.configuration, _close, decoder)


def _share_unread(boot: ZygoteBoot) -> int:
    """Returns a worker's share of the bytes that all workers may hold for clients that do not read their streams, or
    `LEAST_UNREAD_BYTES` if that is more. The latter holds an answer with as many log-probabilities as one may have
    (`server.sampling.MAX_REPLY_LOGPROBS`), whole."""
    num_workers = count_engines(boot.server) * boot.engine.max_num_seqs + WAITING_WORKERS
    return max(LEAST_UNREAD_BYTES, boot.server.max_unread_mb * MIB // num_workers)


def _make_transports(boot: ZygoteBoot) -> Iterator[SealedWorkerTransport]:
    """Yields a transport to each engine of the unit. What they say of themselves differs in where others load their KV from."""
    for index in range(count_engines(boot.server)):
        endpoint = None if boot.engine.kv_transfer is None else endpoint_of(index)
        ready = msgspec.structs.replace(boot.ready, kv_endpoint=endpoint)
        yield SealedWorkerTransport(ready, index, boot.server.replicas)


def _make_decoder(path: Path) -> ForkedDecoder | None:
    """Returns the decoder of a model that takes images, once everything is loaded that they need here."""
    opened = open_image_processor(path)
    if opened is None or not has_pillow():
        return None
    from PIL import Image  # of an extra

    decoder = ForkedDecoder()
    opened[0].cut(Image.frombytes("RGB", (8, 8), bytes(3 * 64)))
    return decoder


def _close() -> None:
    if hardening.sealed() is not None:
        hardening.preload(WORKER_PACKAGES, LATE_MODULES)
        hardening.close_this()
