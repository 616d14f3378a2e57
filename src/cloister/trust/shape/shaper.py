"""The node's side of traffic shaping: answer bytes in, frames out. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from itertools import pairwise
from typing import Final

from cloister.trust.shape.frames import ENDS, FAILS, MAX_FRAME_BYTES, Frame, capacity, encode_frame
from cloister.trust.shape.shapes import TrafficShape, find_edge

_EVENT_END: Final = re.compile(rb"\n\n")
_WHOLE_BUCKET: Final = 1024
"""Whole answers are padded to 4^n KiB, as requests are."""


class Shaper:
    """Cuts an answer into frames of one size and schedules them.

    A frame holds one event (WHATWG HTML, 9.2) or a part of one, never two, so that tokens of one step, such as accepted drafts,
    are sent one by one. Under a shape that is not constant, an answer written as a whole is padded to 4^n KiB and sent at once
    instead.

    Args:
        now_s: arrival of the request. Times are of one monotonic clock.
    """

    def __init__(self, shape: TrafficShape, now_s: float) -> None:
        self._shape = shape
        self._frame_bytes = shape.frame_bytes
        self._pieces: deque[bytes] = deque()
        self._head = b""
        self._tick = math.floor(now_s / shape.tick_s) + 1
        self._num_sent = 0
        self._closing = 0
        self._num_wanted: int | None = None
        self._num_whole = 0
        self._has_written = False

    @property
    def is_over(self) -> bool:
        """Whether the last frame was returned."""
        return self._num_wanted is not None and self._num_sent >= self._num_wanted

    @property
    def num_waiting(self) -> int:
        """Number of queued pieces."""
        return len(self._pieces)

    @property
    def due_s(self) -> float | None:
        """When the next frame may be sent; None if there is nothing to send until more is written."""
        if self.is_over:
            return None
        if self._shape.constant or self._pieces or self._closing:
            return self._tick * self._shape.tick_s
        return None

    def head(self, data: bytes) -> None:
        """Adds bytes that are sent with the next write."""
        self._head += data

    def write(self, data: bytes, now_s: float, *, last: bool = False) -> None:
        """Adds one flush of the answer.

        Args:
            last: the answer is complete.

        Raises:
            ValueError: it was already complete.
        """
        if self._closing:
            raise ValueError("the answer is complete already")
        if not self._pieces and not self._shape.constant:
            self._tick = max(math.floor(now_s / self._shape.tick_s), self._tick - 1) + 1
        data, self._head = self._head + data, b""
        self._queue(data, last=last)
        self._has_written = True
        if last:
            self._closing = ENDS

    def fail(self, now_s: float) -> None:
        """Marks the answer as failed. Queued data are still sent, followed by an error frame, in the same shape."""
        if not self._closing:
            self.write(b"", now_s)
            self._closing = FAILS

    def take(self, now_s: float) -> Frame | None:
        """Returns the frame that may be sent now, else None. Missed ticks are not made up for."""
        due_s = self.due_s
        if due_s is None or now_s < due_s:
            return None
        data = self._next_frame()
        if self._is_done() and self._num_wanted is None:
            self._num_wanted = self._count_wanted(self._num_sent + 1)
        self._num_sent += 1
        if not self._num_whole:
            self._tick = max(math.floor(now_s / self._shape.tick_s), self._tick) + 1
        return Frame(data, self.is_over)

    def _queue(self, data: bytes, *, last: bool) -> None:
        """Queues written data in pieces for frames."""
        if last and not self._has_written and not self._shape.constant:
            self._make_whole(data)
        else:
            self._pieces.extend(_split_events(data))

    def _next_frame(self) -> bytes:
        """Returns the next frame, of `_frame_bytes`, even if there is no data."""
        payload = self._take_payload()
        flags = self._closing if self._is_done() and self._num_wanted is None else 0
        return encode_frame(payload, self._frame_bytes, first=self._num_sent == 0, flags=flags)

    def _is_done(self) -> bool:
        return bool(self._closing) and not self._pieces

    def _take_payload(self) -> bytes:
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        room = capacity(self._frame_bytes, first=self._num_sent == 0)
        if len(piece) > room:
            self._pieces.appendleft(piece[room:])
        return piece[:room]

    def _make_whole(self, data: bytes) -> None:
        bucket = _WHOLE_BUCKET
        while True:
            frame_bytes = min(bucket, MAX_FRAME_BYTES // 2)
            num_frames = bucket // frame_bytes
            room = capacity(frame_bytes, first=True) + (num_frames - 1) * capacity(frame_bytes, first=False)
            if room >= len(data):
                break
            bucket *= 4
        self._frame_bytes, self._num_whole = frame_bytes, num_frames
        self._pieces.append(data)

    def _count_wanted(self, num_needed: int) -> int:
        if self._num_whole:
            return self._num_whole
        return find_edge(max(num_needed, self._shape.least_frames)) if self._shape.constant else num_needed


def _split_events(data: bytes) -> list[bytes]:
    """Splits data into events; bytes after the last one, such as the end of the message, stay with it."""
    if not data:
        return []
    cuts = [match.end() for match in _EVENT_END.finditer(data)][:-1]
    return [data[start:end] for start, end in pairwise([0, *cuts, len(data)])]
