"""Frames of a link on a byte stream, and messages in the chunks that these frames carry.

On the stream a frame is its length (four bytes, big-endian), the sender's monotonic clock in seconds (a double), and a
`LinkFrame`. A message goes in chunks, so that a long one leaves no side without a frame for as long as the link takes to be
lost. A chunk is one byte, its kind, and data.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from cloister.cluster.link import LinkError, LinkFrame, LinkTimes, decode_frame, encode_frame
from cloister.engine.channel import MAX_FRAME_BYTES as MAX_MESSAGE_BYTES

CHUNK_BYTES: Final = 2**17
MAX_FRAME_BYTES: Final = CHUNK_BYTES + 64
"""Longest frame on the stream: a chunk, and the numbers of the link around it."""
STREAM_TIMES: Final = LinkTimes(resend_s=5.0, max_resend_s=5.0, keepalive_s=1.0, lost_s=5.0)
"""A stream loses nothing until it breaks, so nothing is sent again before (`Link.resume`)."""
SILENT_S: Final = 2.5
"""A stream without a frame for this long is opened again: the network may have forgotten it."""
_HEAD: Final = struct.Struct(">Id")


class ChunkKind(IntEnum):
    """What a chunk is."""

    PART = 0
    LAST = 1
    STATUS = 2
    """The engine has ended; the data is its exit status in decimal."""


def split(message: bytes) -> Iterator[bytes]:
    """Yields the chunks of a message. Raises LinkError if it is too long."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise LinkError(f"a message of {len(message)} bytes is over the link's limit of {MAX_MESSAGE_BYTES}")
    for begin in range(0, max(1, len(message)), CHUNK_BYTES):
        end = begin + CHUNK_BYTES
        yield bytes([ChunkKind.LAST if end >= len(message) else ChunkKind.PART]) + message[begin:end]


class Assembler:
    """Joins chunks to messages."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, chunk: bytes) -> tuple[ChunkKind, bytes] | None:
        """Returns what a chunk completes: a message (LAST), or the status of an engine.

        Raises:
            LinkError: it is no chunk, or the message is too long.
        """
        try:
            kind = ChunkKind(chunk[0])
        except (IndexError, ValueError):
            raise LinkError("the other side of a link sent a chunk of unknown kind") from None
        if kind is ChunkKind.STATUS:
            return kind, chunk[1:]
        self._num_bytes += len(chunk) - 1
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise LinkError(f"the other side of a link sent a message over the limit of {MAX_MESSAGE_BYTES} bytes")
        self._parts.append(chunk[1:])
        if kind is ChunkKind.PART:
            return None
        message = b"".join(self._parts)
        self._parts, self._num_bytes = [], 0
        return kind, message


class FrameStream:
    """The frames of a link on one connection, whose other side is known already."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, frame: LinkFrame) -> None:
        """Sends a frame without blocking; it is lost if the connection is."""
        if not self._writer.is_closing():
            data = encode_frame(frame)
            self._writer.write(_HEAD.pack(len(data), asyncio.get_running_loop().time()) + data)

    async def receive(self) -> tuple[LinkFrame, float] | None:
        """Returns the next frame, and the sender's clock; None if the connection broke or brought none for `SILENT_S`.

        Raises:
            LinkError: what came is no frame, or a longer one than any link sends.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                num_bytes, sent_s = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                if num_bytes > MAX_FRAME_BYTES:
                    raise LinkError(f"a frame of {num_bytes} bytes is over the link's limit of {MAX_FRAME_BYTES}")
                return decode_frame(await self._reader.readexactly(num_bytes)), sent_s
        except (asyncio.IncompleteReadError, OSError):  # OSError: TimeoutError and those of TLS too
            return None

    def close(self) -> None:
        """Sends what is on its way, and closes the connection."""
        self._writer.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._writer.transport.abort()
