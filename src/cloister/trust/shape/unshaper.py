"""The client's side of traffic shaping: frames in, answer bytes out. Pure."""

from __future__ import annotations

from cloister.trust.shape.frames import (
    COUNT_MASK,
    ENDS,
    FAILS,
    MAGIC,
    MAX_FRAME_BYTES,
    STREAM_HEAD_BYTES,
    WORD_BYTES,
    ShapeError,
)


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
