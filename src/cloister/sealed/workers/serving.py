"""What one worker serves: the node's application, with the engine and the keys elsewhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message

from cloister.privacy.sealing import (
    CHUNKED,
    HttpRequest,
    KeyConfiguration,
    RequestHead,
    bucket_bytes,
    encode_request,
    seal_chunked_request,
)
from cloister.sealed.gateway import NODE_PATH
from cloister.sealed.workers.remote import RemoteUnsealer
from cloister.sealed.workers.wire import BodyPiece, Gone, Head, frame, from_asgi, receive_for_worker, to_scope

_LIMIT_BYTES = 2**20
_REHEARSED = (
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'),
    ("/v1/completions", b'{"prompt": "Hello", "max_tokens": 4, "stream": true}'),
    ("/v1/embeddings", b'{"input": "Hello"}'),
    ("/v1/chat/completions", b'{"messages": 1}'),
)
"""Requests of nobody's, sealed to a key that is dropped; those that need the engine end with an error, as there is none yet."""


class NodeServing:
    """Serves one exchange on the application of a node.

    Args:
        node: opens and seals (`sealed.node.node_app`).
        link: has the node reach the engine through a channel.
        rehearsal: the same with a key of its own, to which `configuration` belongs; it is dropped after the warm-up.
        close: closes this process when it has all that it needs.
    """

    def __init__(
        self,
        node: ASGIApp,
        link: Callable[[socket.socket], Awaitable[None]],
        unsealer: RemoteUnsealer,
        rehearsal: ASGIApp,
        configuration: KeyConfiguration,
        close: Callable[[], None],
    ) -> None:
        self._node = node
        self._link = link
        self._unsealer = unsealer
        self._rehearsal: tuple[ASGIApp, KeyConfiguration] | None = (rehearsal, configuration)
        self.close = close

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

    async def serve(self, front: socket.socket, engine: socket.socket, key_service: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=front, limit=_LIMIT_BYTES)
        await self._link(engine)
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
