"""Reads the rest of a refused body before its connection is closed, so that the client finds the reply.

A client that sends its whole body before it reads gets no reply from a connection that is closed while data of it is unread:
TCP resets it (RFC 1122, 4.2.2.13; RFC 9112, 9.6). A connection that stays open needs no help: the ASGI server reads the rest.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.load_shedding import BodyPace

LINGER_S: Final = 10.0
"""How long a client may continue to send a body that nobody reads."""
LINGER_GRACE_S: Final = 1.0
"""How long it may pause; sending earns more time."""
LINGER_BYTES_PER_S: Final = 64 * 2**10
"""Minimum rate: a slower client would not finish in time."""
LINGER_BYTES: Final = 256 * 2**20
"""Most bytes to read of it."""
MAX_LINGERING: Final = 128
"""Requests that linger at the same time; others are closed immediately, since a request with a reply gives way to no other
connection."""


class LingeringMiddleware:
    """Delays the end of a reply to a request whose body was not read, until the rest has arrived or a limit is reached.

    The reply itself is sent first. Applies only if the connection will be closed, and not to a client that waits until it is
    asked for its body (`Expect: 100-continue`).
    """

    def __init__(self, app: ASGIApp, linger_s: float = LINGER_S, linger_bytes: int = LINGER_BYTES) -> None:
        self._app = app
        self._linger_s = linger_s
        self._linger_bytes = linger_bytes
        self._num_lingering = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _sends_body(scope):
            await self._app(scope, receive, send)
            return
        has_more, has_asked, closes, lingers = True, False, _will_close(scope), False

        async def receive_noting() -> Message:
            nonlocal has_more, has_asked
            has_asked = True
            message = await receive()
            has_more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_noting(message: Message) -> None:
            nonlocal closes, lingers
            if message["type"] == "http.response.start":
                closes = closes or _says_close(message.get("headers", ()))
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            is_sent = has_asked or not _has(scope["headers"], b"expect", b"100-continue")
            if is_last and has_more and closes and is_sent and self._num_lingering < MAX_LINGERING:
                lingers = True
                message = {**message, "more_body": True}
            await send(message)

        await self._app(scope, receive_noting, send_noting)
        if lingers:  # not before the application has released what it had read
            await self._discard(receive)
            await send({"type": "http.response.body", "body": b""})

    async def _discard(self, receive: Receive) -> None:
        num_bytes, has_more, now_s = 0, True, asyncio.get_running_loop().time
        pace = BodyPace(now_s(), self._linger_s, grace_s=LINGER_GRACE_S, bytes_per_s=LINGER_BYTES_PER_S)
        self._num_lingering += 1
        try:
            while has_more and num_bytes < self._linger_bytes:
                began_s = now_s()
                async with asyncio.timeout_at(pace.deadline(began_s)):
                    message = await receive()
                piece = message.get("body", b"")
                pace.count(now_s() - began_s, len(piece))
                num_bytes += len(piece)
                has_more = message.get("more_body", False)
        except TimeoutError:
            return
        finally:
            self._num_lingering -= 1


def _sends_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in scope["headers"]
    )


def _will_close(scope: Scope) -> bool:
    """Whether the connection of a request ends with its reply (RFC 9112, 9.3)."""
    return scope.get("http_version") == "1.0" or _says_close(scope["headers"])


def _says_close(headers: object) -> bool:
    return _has(headers, b"connection", b"close")


def _has(headers: object, wanted: bytes, option: bytes) -> bool:
    """Whether a header names an option."""
    assert isinstance(headers, list | tuple)
    return any(
        name.lower() == wanted and option in (each.strip() for each in value.lower().split(b",")) for name, value in headers
    )
