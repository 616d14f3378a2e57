"""Frame formats inside a sealed stream. Pure.

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


# The framing of a shaped answer that a client requests: our own, or binary HTTP for any RFC 9292 reader.

FRAMES: Final = "frames"
"""A header in each frame, as in `frames`: the default."""
BINARY_HTTP: Final = "binary-http"
"""Frames whose concatenation is one binary HTTP message, as in `binary_http`."""
FRAMINGS: Final = (FRAMES, BINARY_HTTP)
FRAMING_FIELD: Final = b"cloister-framing"
"""Field of the sealed request for the framing."""
