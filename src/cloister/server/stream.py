"""Server-sent events (WHATWG HTML, 9.2) as OpenAI clients read them: one `data:` line per chunk, `[DONE]` at the end."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cloister.server.errors import error_object
from cloister.server.logs import public_error
from cloister.types.errors import CloisterError

EVENTS: Final = "text/event-stream"
DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.Encoder().encode

Chunks = AsyncGenerator[bytes, None]


def events(chunks: Iterable[Any]) -> bytes:
    """Returns chunks as events, joined for one write."""
    return b"".join(b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks)


def named_events(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns chunks as events, each named by its `type`."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (chunk["type"].encode(), _encode(chunk)) for chunk in chunks)


class EventTemplate:
    """An event in which only one text varies: encoded once, and split at the text. Most tokens need nothing else.

    Args:
        make: returns the chunk for a text, which must occur in it once, as a whole string.
        encode: encodes chunks as events.
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, make: Callable[[str], Any], encode: Callable[[Iterable[Any]], bytes] = events) -> None:
        place = secrets.token_hex(16)
        self._head, self._tail = encode([make(place)]).split(b'"%s"' % place.encode())

    def fill(self, text: str) -> bytes:
        """Returns the event with `text` in it."""
        return self._head + _encode(text) + self._tail


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends.

    Attributes:
        done: bytes after the last chunk.
        tell: converts an error to an event.
    """

    done: bytes
    tell: Callable[[CloisterError], bytes]


OPENAI: Final = Ending(DONE, lambda error: events([error_object(error)]))


async def open_stream(chunks: Chunks, ending: Ending = OPENAI, media_type: str = EVENTS) -> EventStream:
    """Waits for the first chunk, so that a request that is refused still gets its status, and returns the response.

    Raises:
        CloisterError: the request was refused, or failed before its first token.
    """
    try:
        return EventStream(await anext(chunks), chunks, ending, media_type)
    except BaseException:
        await chunks.aclose()
        raise


class EventStream(Response):
    """A streaming response. An error during the stream becomes its last event."""

    def __init__(self, first: bytes, rest: Chunks, ending: Ending, media_type: str) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"x-accel-buffering": "no"})  # a buffering proxy would defeat streaming
        self._first = first
        self._rest = rest
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await send(_body(self._first))
                async for chunk in self._rest:
                    await send(_body(chunk))
            except Exception as error:
                await send(_body(self._ending.tell(public_error(error))))
            await send({"type": "http.response.body", "body": self._ending.done, "more_body": False})


def _body(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
