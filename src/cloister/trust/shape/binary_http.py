"""Shaped frames that together form one valid binary HTTP response (RFC 9292). Pure.

Sizes and times are those of the shape; frames are filled with padding that every reader skips:

- before the response: informational responses, 102 (Processing), with a field of padding;
- in its head: a field of padding;
- between events: comments of the event stream (WHATWG HTML, 9.2.6), each frame one content chunk;
- after its end: zeros (RFC 9292, section 3.8).

Content other than an event stream has no place for padding, so it is buffered until complete. An answer that fails continues as
padding to where it would have ended, and its message lacks its end.
"""

from __future__ import annotations

from typing import Final

from cloister.trust.sealing import BinaryHttpWriter, Content, MessageReader, ResponseHead, find_field
from cloister.trust.sealing.messages import encode_varint
from cloister.trust.shape.frames import MAX_FRAME_BYTES
from cloister.trust.shape.shaper import Shaper
from cloister.trust.shape.shapes import TrafficShape

PADDING_FIELD: Final = b"cloister-padding"
PROCESSING: Final = 102
_EVENT_END: Final = b"\n\n"
_LENGTH_BYTES: Final = 2
"""Size of a content chunk that fills a frame: from 64 to 16,383 bytes."""


class BinaryHttpShaper(Shaper):
    """Like `Shaper`, but rewrites the same binary HTTP message with padding inside."""

    def __init__(self, shape: TrafficShape, now_s: float) -> None:
        super().__init__(shape, now_s)
        self._reader = MessageReader()
        self._writer = BinaryHttpWriter()
        self._head_part: ResponseHead | None = None
        self._content = bytearray()
        self._is_stream = False
        self._has_ended = False

    def _queue(self, data: bytes, *, last: bool) -> None:
        for part in self._reader.feed(data):
            if isinstance(part, ResponseHead) and part.is_final:
                self._head_part = part
                self._is_stream = (find_field(part.fields, b"content-type") or "").startswith("text/event-stream")
                if self._is_stream:
                    self._pieces.extend(self._frames_of_head(part))
            elif isinstance(part, Content):
                self._content += part.data
        if self._is_stream:
            self._queue_events(last=last)
        elif last:
            self._queue_whole()

    def _next_frame(self) -> bytes:
        return self._pieces.popleft() if self._pieces else self._fill()

    def _queue_events(self, *, last: bool) -> None:
        end = self._content.rfind(_EVENT_END)
        if end >= 0:
            events = bytes(self._content[:end])
            del self._content[: end + len(_EVENT_END)]
            for event in events.split(_EVENT_END):
                self._pieces.extend(self._frames_of_event(event + _EVENT_END))
        if last:
            self._has_ended = True
            self._pieces.extend(self._cut(self._writer.content(bytes(self._content)) + self._writer.end()))

    def _queue_whole(self) -> None:
        if self._head_part is None:
            return
        message = self._writer.head(self._head_part) + self._writer.content(bytes(self._content)) + self._writer.end()
        if not self._shape.constant:
            self._num_whole, self._frame_bytes = _bucket(len(message))
            message = message.ljust(self._num_whole * self._frame_bytes, b"\0")
        self._pieces.extend(self._cut(message))
        self._has_ended = True

    def _cut(self, message: bytes) -> list[bytes]:
        """Returns the end of a message as frames, followed by zeros."""
        size = self._frame_bytes
        return [message[start : start + size].ljust(size, b"\0") for start in range(0, len(message), size)]

    def _frames_of_head(self, head: ResponseHead) -> list[bytes]:
        """Returns a head as whole frames, the last one filled with a padding field."""
        size = self._frame_bytes
        bare = len(BinaryHttpWriter().head(head)) - self._writer.has_head  # only the first head has the framing indicator
        wanted = size
        while (num_padding := _padding_value_bytes(wanted - bare)) is None:
            wanted += size
        encoded = self._writer.head(ResponseHead(head.status, (*head.fields, (PADDING_FIELD, b"0" * num_padding))))
        return [encoded[start : start + size] for start in range(0, wanted, size)]

    def _frames_of_event(self, event: bytes) -> list[bytes]:
        room = self._frame_bytes - _LENGTH_BYTES
        cuts = [event[start : start + room] for start in range(0, len(event), room)]
        cuts[-1] += _comment(room - len(cuts[-1]))
        return [self._writer.content(cut) for cut in cuts]

    def _fill(self) -> bytes:
        if self._has_ended:
            return bytes(self._frame_bytes)
        if self._is_stream:
            return self._writer.content(_comment(self._frame_bytes - _LENGTH_BYTES))
        processing = ResponseHead(PROCESSING, ())
        return b"".join(self._frames_of_head(processing))


def _padding_value_bytes(room: int) -> int | None:
    """Returns the value length of a padding field line of `room` bytes in total; None if impossible."""
    room -= len(encode_varint(len(PADDING_FIELD)) + PADDING_FIELD)
    lengths = (room - num_length for num_length in (1, 2, 4))
    return next((length for length in lengths if length >= 0 and length + len(encode_varint(length)) == room), None)


def _comment(num_bytes: int) -> bytes:
    """Returns padding lines of an event stream: a comment, or an empty line if a comment does not fit."""
    return b"\n" * num_bytes if num_bytes < 2 else b":" + b" " * (num_bytes - 2) + b"\n"


def _bucket(num_bytes: int) -> tuple[int, int]:
    """Returns the number and size of frames of a whole answer: 4^n KiB in total."""
    bucket = 1024
    while bucket < num_bytes:
        bucket *= 4
    size = min(bucket, MAX_FRAME_BYTES // 2)
    return bucket // size, size
