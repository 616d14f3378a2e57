"""A link between a front and an engine: every message arrives once and in order, or the link is lost on both sides.

What carries the frames may lose, repeat, delay and reorder them: a datagram network, or a stream that is opened again after a
cut. Pure: all functions take `now`, and return the frames to send.

The client draws the number of a session, the server answers with a token of its own, and only frames with both count (the
handshake of TCP, RFC 9293 section 3.5, against frames of earlier sessions). Payloads are numbered from 1; each frame
acknowledges all payloads up to a number, and what is not acknowledged is sent again.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from cloister.types.errors import CloisterError

RESET: Final = -1
"""In place of a payload's number: the sender knows no such session."""
MAX_EARLY: Final = 1024
"""Payloads kept that arrived before their predecessors; further ones are dropped, and sent again."""
TIMER_ERROR_S: Final = 1e-6
"""Timers of event loops may run out so much early."""
MAX_PENDING: Final = 16
"""Sessions that a server has answered and that have not sent anything yet."""


class LinkError(CloisterError):
    """A frame that no link sends, or too many messages that the other side does not read."""

    code = "link_error"


class LinkFrame(msgspec.Struct, frozen=True, array_like=True):
    """What is sent over a link.

    Attributes:
        session: drawn by the client.
        token: drawn by the server; 0 in a client's first frames, which ask for it.
        number: of the payload, from 1; 0 without one; `RESET` ends the session.
        ack: the sender has received all payloads up to this number.
    """

    session: int
    token: int
    number: int = 0
    ack: int = 0
    payload: bytes = b""


encode_frame: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(LinkFrame).decode


def decode_frame(data: bytes) -> LinkFrame:
    """Reads a frame. Raises LinkError if it is none."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise LinkError("the other side of a link sent something that is not a frame") from error


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The times of a link, in seconds.

    Attributes:
        resend_s: what is not acknowledged is sent again after this time, then after twice that, up to `max_resend_s`.
        keepalive_s: an idle side sends a frame this often.
        lost_s: a link without a frame from the other side for this long is lost.
    """

    resend_s: float = 0.2
    max_resend_s: float = 1.0
    keepalive_s: float = 1.0
    lost_s: float = 5.0


class Link:
    """One side of a session.

    Args:
        session: its number.
        token: the server's token; 0 if this side is the client, which does not know it yet.
        max_unread: messages that may wait for an acknowledgement; one more, and the link is lost.

    Attributes:
        is_lost: no message will arrive or be sent any more.
    """

    def __init__(
        self, session: int, now: float, token: int = 0, times: LinkTimes = LinkTimes(), max_unread: int = 100_000
    ) -> None:
        self.is_lost = False
        self._session, self._token = session, token
        self._times = times
        self._max_unread = max_unread
        self._unread: deque[tuple[int, bytes]] = deque()
        self._num_sent = 0  # payloads sent at least once
        self._num_queued = 0
        self._num_received = 0
        self._early: dict[int, bytes] = {}
        self._owes_frame = True
        self._resend_s = times.resend_s
        self._heard_at_s = self._spoke_at_s = self._sent_at_s = now  # the last: the oldest payload without acknowledgement

    def send(self, payload: bytes) -> None:
        """Queues a message; `poll` returns its frame."""
        if self.is_lost:
            return
        if len(self._unread) >= self._max_unread:
            self.is_lost = True
            return
        self._num_queued += 1
        self._unread.append((self._num_queued, payload))

    def receive(self, frame: LinkFrame, now: float) -> list[bytes]:
        """Takes a frame of the other side, and returns the messages that are complete now, in order."""
        if self.is_lost or frame.session != self._session or not (frame.token == self._token or self._token == 0):
            return []
        if frame.number == RESET:
            self.is_lost = True
            return []
        if frame.token == 0:
            return []
        if self._token == 0:
            self._token = frame.token
            self._owes_frame = True  # the server waits for a frame with its token
        self._heard_at_s = now
        self._forget_read(frame.ack, now)
        return self._take(frame) if frame.number else []

    def poll(self, now: float) -> list[LinkFrame]:
        """Returns the frames that are due. Call it after `send` and `receive`, and at `next_poll_s`."""
        now += TIMER_ERROR_S
        if now - self._heard_at_s >= self._times.lost_s:
            self.is_lost = True
        if self.is_lost:
            return []
        due = self._due_payloads(now) if self._token else []
        idle_s = now - self._spoke_at_s
        if not due and (self._owes_frame or idle_s >= (self._times.keepalive_s if self._token else self._times.resend_s)):
            due = [(0, b"")]
        if due:
            self._owes_frame, self._spoke_at_s = False, now
        return [LinkFrame(self._session, self._token, number, self._num_received, payload) for number, payload in due]

    def resume(self) -> None:
        """What carries the frames was opened again: all that is not acknowledged is due, and so is a frame without payload."""
        self._num_sent = self._num_queued - len(self._unread)
        self._owes_frame = True

    def reset(self) -> LinkFrame:
        """Loses the link, and returns the frame that tells the other side."""
        self.is_lost = True
        return LinkFrame(self._session, self._token, RESET)

    @property
    def has_unread(self) -> bool:
        """Whether the other side has not acknowledged everything, as far as this side knows."""
        return bool(self._unread) and not self.is_lost

    @property
    def num_unread(self) -> int:
        """Messages that the other side has not acknowledged."""
        return 0 if self.is_lost else len(self._unread)

    @property
    def next_poll_s(self) -> float:
        """When `poll` must be called even if nothing arrives."""
        speaks_at_s = self._spoke_at_s + (self._times.keepalive_s if self._token else self._times.resend_s)
        if self._token and self._unread:
            speaks_at_s = min(speaks_at_s, self._sent_at_s + self._resend_s)
        return min(speaks_at_s, self._heard_at_s + self._times.lost_s)

    def _forget_read(self, ack: int, now: float) -> None:
        if self._unread and self._unread[0][0] <= ack:
            self._resend_s, self._sent_at_s = self._times.resend_s, now
        while self._unread and self._unread[0][0] <= ack:
            self._unread.popleft()

    def _take(self, frame: LinkFrame) -> list[bytes]:
        self._owes_frame = True
        if frame.number <= self._num_received:
            return []  # it arrived before; its acknowledgement was lost or is on its way
        if frame.number > self._num_received + 1 and len(self._early) >= MAX_EARLY:
            return []
        self._early[frame.number] = frame.payload
        complete: list[bytes] = []
        while (payload := self._early.pop(self._num_received + 1, None)) is not None:
            self._num_received += 1
            complete.append(payload)
        return complete

    def _due_payloads(self, now: float) -> list[tuple[int, bytes]]:
        """New payloads; all that are not acknowledged if it is time to send them again."""
        num_new, self._num_sent = self._num_queued - self._num_sent, self._num_queued
        num_old = len(self._unread) - num_new
        if num_old and now - self._sent_at_s >= self._resend_s:
            self._resend_s, self._sent_at_s = min(2 * self._resend_s, self._times.max_resend_s), now
            return list(self._unread)
        if num_new and not num_old:
            self._sent_at_s = now
        return [self._unread[index] for index in range(num_old, len(self._unread))]


class LinkServer:
    """The server's side of all sessions; it serves the one that spoke last.

    Args:
        draw: draws a token, above 0.

    Attributes:
        link: the session that is served; None before the first one.
    """

    def __init__(self, draw: Callable[[], int] = lambda: 1 + secrets.randbits(62), times: LinkTimes = LinkTimes()) -> None:
        self.link: Link | None = None
        self._draw = draw
        self._times = times
        self._served: tuple[int, int] | None = None
        self._pending: dict[int, int] = {}

    def receive(self, frame: LinkFrame, now: float) -> tuple[list[bytes], list[LinkFrame]]:
        """Takes a client's frame. Returns the messages that are complete now, and frames to reply at once.

        `link` is another object if a new session is served; its predecessor is lost then.
        """
        name = (frame.session, frame.token)
        if name == self._served and self.link is not None and not self.link.is_lost:
            return self.link.receive(frame, now), []
        if frame.token == 0:
            return [], [self._welcome(frame.session)] if frame.number != RESET else []
        if self._pending.get(frame.session) == frame.token and frame.number != RESET:
            self._serve(name, now)
            assert self.link is not None
            return self.link.receive(frame, now), []
        return [], [] if frame.number == RESET else [LinkFrame(*name, RESET)]

    def _welcome(self, session: int) -> LinkFrame:
        """Answers a client's first frame; a repeated one gets the same answer."""
        if self._served is not None and self._served[0] == session:
            return LinkFrame(*self._served)
        if session not in self._pending:
            if len(self._pending) >= MAX_PENDING:
                del self._pending[next(iter(self._pending))]
            self._pending[session] = self._draw()
        return LinkFrame(session, self._pending[session])

    def _serve(self, name: tuple[int, int], now: float) -> None:
        if self.link is not None:
            self.link.is_lost = True
        session, token = name
        del self._pending[session]
        self._served = name
        self.link = Link(session, now, token, self._times)
