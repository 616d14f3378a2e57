"""Frame formats inside a sealed stream, and the client's reader of them. Pure.

A shaped stream is a sequence of frames of one size, each the plain text of one sealed chunk. The first begins with six bytes:
0xC1 (no framing indicator of Binary HTTP, RFC 9292, 3.3, begins so), the version 1, and the size of every frame as a 32-bit
number. Then, and at once in all other frames: a 32-bit word, whose top bits are flags and whose others count the payload bytes
that follow, those bytes, and zeros up to the size. The concatenated payloads are the answer. Numbers are big-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"\xc1\x01"
STREAM_HEAD_BYTES: Final = len(MAGIC) + 4
WORD_BYTES: Final = 4
ENDS: Final = 1 << 31
"""Flag: the answer is complete with this frame. What follows is padding."""
FAILS: Final = 1 << 30
"""Flag: the node failed; there is no more answer. What follows is padding."""
COUNT_MASK: Final = FAILS - 1
MAX_FRAME_BYTES: Final = 1 << 14
"""Maximum frame size, so that a sealed chunk stays within the limit of every reader of chunked OHTTP."""


class ShapeError(Exception):
    """A shaped stream cannot be read: malformed, truncated, or marked as failed by the node."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame to be sealed.

    Attributes:
        data: `frame_bytes` bytes.
        is_last: no frame follows, so this one is sealed as the final chunk.
    """

    data: bytes
    is_last: bool


def capacity(frame_bytes: int, *, first: bool) -> int:
    """Returns how many payload bytes a frame holds."""
    return frame_bytes - WORD_BYTES - (STREAM_HEAD_BYTES if first else 0)


def encode_frame(payload: bytes, frame_bytes: int, *, first: bool, flags: int = 0) -> bytes:
    """Returns one frame.

    Raises:
        ValueError: the payload does not fit.
    """
    if len(payload) > capacity(frame_bytes, first=first):
        raise ValueError(f"{len(payload)} bytes do not fit into a frame of {frame_bytes}")
    head = MAGIC + frame_bytes.to_bytes(4) if first else b""
    return (head + (flags | len(payload)).to_bytes(WORD_BYTES) + payload).ljust(frame_bytes, b"\0")


class Unshaper:
    """Converts the opened plain text of a sealed answer, split in any way, to the answer.

    An unshaped stream passes unchanged, unless `required`: if the profile requires a shape, no other stream is accepted. After
    `is_complete` there is only padding, which must still be read to the final chunk: disconnecting early reveals the length
    that the padding hides.

    Args:
        required: refuse a stream that is not shaped.
    """

    def __init__(self, *, required: bool = False) -> None:
        self._required = required
        self._buffer = bytearray()
        self._frame_bytes: int | None = None
        self._num_frames = 0
        self._passes = False
        self._has_failed = False
        self.is_complete = False

    def feed(self, data: bytes) -> bytes:
        """Adds plain text; returns the new part of the answer, possibly empty.

        Raises:
            ShapeError: the stream is malformed, or not shaped although that was required.
        """
        if self._passes:
            return data
        self._buffer += data
        if self._frame_bytes is None and not self._read_head():
            return self._drain() if self._passes else b""
        size = self._frame_bytes or 0
        payloads = []
        while len(self._buffer) >= size:
            payloads.append(self._read_frame(bytes(self._buffer[:size])))
            del self._buffer[:size]
        return b"".join(payloads)

    def close(self) -> None:
        """Marks the final chunk as read.

        Raises:
            ShapeError: the answer is not complete, or the node failed.
        """
        if self._has_failed:
            raise ShapeError("the node failed before the answer was complete; send the request again")
        if self._passes or (self._frame_bytes is None and not self._buffer and not self._required):
            return
        if self._buffer or not self.is_complete:
            raise ShapeError("the stream ended before the answer was complete; send the request again")

    def _read_head(self) -> bool:
        """Reads the first bytes; returns whether the frame size is known."""
        start = bytes(self._buffer[: len(MAGIC)])
        if start != MAGIC[: len(start)]:
            if self._required:
                raise ShapeError("the answer is not shaped as the node's profile promises; do not use this node")
            self._passes = True
            return False
        if len(self._buffer) < STREAM_HEAD_BYTES:
            return False
        size = int.from_bytes(self._buffer[len(MAGIC) : STREAM_HEAD_BYTES])
        if not STREAM_HEAD_BYTES + WORD_BYTES < size <= MAX_FRAME_BYTES:
            raise ShapeError("the stream states a size of frames that cannot be")
        self._frame_bytes = size
        return True

    def _read_frame(self, frame: bytes) -> bytes:
        start = STREAM_HEAD_BYTES if self._num_frames == 0 else 0
        self._num_frames += 1
        word = int.from_bytes(frame[start : start + WORD_BYTES])
        start += WORD_BYTES
        end = start + (word & COUNT_MASK)
        closing = word & (ENDS | FAILS)
        is_padding = self.is_complete or self._has_failed
        if end > len(frame) or any(frame[end:]) or closing == ENDS | FAILS or (is_padding and word):
            raise ShapeError("a frame of the stream is malformed")
        self.is_complete |= closing == ENDS
        self._has_failed |= closing == FAILS
        return frame[start:end]

    def _drain(self) -> bytes:
        data = bytes(self._buffer)
        self._buffer.clear()
        return data


# The framing of a shaped answer that a client requests: our own, or binary HTTP for any RFC 9292 reader.

FRAMES: Final = "frames"
"""A header in each frame, as in `frames`: the default."""
BINARY_HTTP: Final = "binary-http"
"""Frames whose concatenation is one binary HTTP message, as in `binary_http`."""
FRAMINGS: Final = (FRAMES, BINARY_HTTP)
FRAMING_FIELD: Final = b"cloister-framing"
"""Field of the sealed request for the framing."""
