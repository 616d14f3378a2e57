"""An ASGI exchange over a socket between the front and one worker: the same messages, as frames of msgpack."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

import msgspec
from starlette.types import Message, Scope

MAX_FRAME_BYTES: Final = 32 * 2**20
_LENGTH: Final = struct.Struct(">I")


class Head(msgspec.Struct, frozen=True, tag="head"):
    """Front to worker: a request begins."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]


class BodyPiece(msgspec.Struct, frozen=True, tag="piece"):
    """Front to worker: a piece of the sealed body."""

    body: bytes
    more: bool


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Front to worker: the client has disconnected."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Worker to front: the reply begins."""

    status: int
    headers: list[tuple[bytes, bytes]]


class SealedPart(msgspec.Struct, frozen=True, tag="part"):
    """Worker to front: a piece of the sealed response."""

    body: bytes
    more: bool


ToWorker = Head | BodyPiece | Gone
ToFront = Start | SealedPart

_encode: Final = msgspec.msgpack.Encoder().encode
_to_worker: Final = msgspec.msgpack.Decoder(ToWorker)
_to_front: Final = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToWorker | ToFront) -> bytes:
    """Returns a message as bytes to send."""
    payload = _encode(message)
    return _LENGTH.pack(len(payload)) + payload


async def receive_for_worker(reader: asyncio.StreamReader) -> ToWorker | None:
    """Reads a message from the front; None when it has closed the socket."""
    payload = await _receive(reader)
    message: ToWorker | None = None if payload is None else _to_worker.decode(payload)
    return message


async def receive_for_front(reader: asyncio.StreamReader) -> ToFront | None:
    """Reads a message from a worker; None when it has closed the socket."""
    payload = await _receive(reader)
    message: ToFront | None = None if payload is None else _to_front.decode(payload)
    return message


def to_scope(head: Head) -> Scope:
    """Returns the ASGI scope of a request that the front accepted."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": head.method,
        "scheme": "http",
        "path": head.path,
        "raw_path": head.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": head.headers,
        "client": None,
        "server": None,
        "state": {},
    }


def from_asgi(message: Message) -> ToFront:
    """Converts an ASGI message of the application to a message to the front."""
    if message["type"] == "http.response.start":
        return Start(message["status"], [(bytes(name), bytes(value)) for name, value in message.get("headers", ())])
    return SealedPart(bytes(message.get("body", b"")), bool(message.get("more_body", False)))


def to_asgi(message: Start | SealedPart) -> dict[str, Any]:
    """Converts a worker's message to an ASGI message."""
    if isinstance(message, Start):
        return {"type": "http.response.start", "status": message.status, "headers": message.headers}
    return {"type": "http.response.body", "body": message.body, "more_body": message.more}


async def _receive(reader: asyncio.StreamReader) -> bytes | None:
    try:
        size: int = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
        return await reader.readexactly(size) if size <= MAX_FRAME_BYTES else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
