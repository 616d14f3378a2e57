"""Bound on the bytes of replies that clients have not read: which reply ends when a server holds too many. No I/O, no clock.

A client that reads too little first makes its reply wait (back-pressure): a stream writes nothing further, and a whole body is
handed over piece by piece. Then the rest of the body collects, or the outputs that the engine continues to make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from starlette.types import Scope

from cloister.server.load_shedding import BYTES_PER_S, GRACE_S
from cloister.types.errors import CloisterError

MIB: Final = 2**20
UNREAD_BYTES: Final = 512 * MIB
"""Default limit for all replies of one process."""
SHARE_OF_ONE: Final = 8
"""One reply may hold this share of the limit."""
LEAST_VICTIM_BYTES: Final = 64 * 2**10
"""A reply that holds no more than this is not ended to make room: as many bytes wait for the kernel in an honest reply."""
LAST_BYTES: Final = 16 * 2**10
"""Bytes that an ended stream may still write: its error."""
_STATE: Final = "unread_reply"


class UnreadReplyError(CloisterError):
    """A stream was ended because its client did not read it."""

    code = "reply_not_read"
    status = 503

    def __init__(self) -> None:
        super().__init__(
            "This reply was ended because too much of it was not read; read a stream as it comes, or ask for fewer tokens or "
            "log-probabilities at once."
        )


class UnreadReply:
    """The account of the unread bytes of one reply.

    Args:
        network: network of its client.
        end: ends it; called once, at most.

    Attributes:
        num_bytes: all bytes held of it.
        num_queued: those of them that wait as outputs of the engine.
        is_slow: its client has read less than `BYTES_PER_S` in the last `GRACE_S` or so, though there was more to read.
        is_ended: it was ended.
        is_counted: its bytes count among those of all replies.
    """

    __slots__ = (
        "_end",
        "_marked_bytes",
        "_marked_s",
        "_replies",
        "is_counted",
        "is_ended",
        "is_slow",
        "network",
        "num_bytes",
        "num_queued",
    )

    def __init__(self, replies: UnreadReplies, network: str, end: Callable[[], None]) -> None:
        self.network = network
        self.num_bytes = 0
        self.num_queued = 0
        self.is_slow = False
        self.is_ended = False
        self.is_counted = True
        self._replies = replies
        self._end = end
        self._marked_s = 0.0
        self._marked_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Adds bytes that are now held, or (below 0) removes bytes that no longer are."""
        self.num_bytes += num_bytes
        if self.is_counted:
            self._replies.change(num_bytes)

    def queue(self, num_bytes: int) -> None:
        """As `hold`, for outputs of the engine."""
        self.num_queued += num_bytes
        self.hold(num_bytes)
        if num_bytes > 0 and self.is_counted and self.num_queued > self._replies.limit_of_one_bytes:
            self._replies.end(self)

    def begin_waiting(self, num_read_bytes: int, now_s: float) -> None:
        """Called when something begins to wait for the client, which has read this much of the reply."""
        self.is_slow, self._marked_bytes, self._marked_s = False, num_read_bytes, now_s

    def note_read(self, num_read_bytes: int, now_s: float) -> None:
        """Called from time to time while something waits for the client. Ends a reply that holds more than its share if its
        client is slow."""
        waited_s = now_s - self._marked_s
        if waited_s < GRACE_S:
            return
        is_slow = num_read_bytes - self._marked_bytes < BYTES_PER_S * waited_s
        self.begin_waiting(num_read_bytes, now_s)
        self.is_slow = is_slow
        if is_slow and self.is_counted and self.num_bytes > self._replies.limit_of_one_bytes:
            self._replies.end(self)

    def finish(self) -> None:
        """Ends it."""
        self.is_ended = True
        self._end()


class UnreadReplies:
    """The unread bytes of all replies of one process. Used from one thread.

    Over the limit it ends replies of slow clients, or if there are none, of any; among them the largest of the network that
    holds most. So a flood of unread replies ends its own.

    Args:
        limit_bytes: most bytes of all replies; one may have an eighth, beyond which it is ended if its client is slow, or if
            they are outputs of the engine, whatever the client reads.

    Attributes:
        num_bytes: of all replies that were not ended.
    """

    def __init__(self, limit_bytes: int = UNREAD_BYTES, limit_of_one_bytes: int | None = None) -> None:
        self.num_bytes = 0
        self.limit_of_one_bytes = limit_of_one_bytes or limit_bytes // SHARE_OF_ONE
        self._limit_bytes = limit_bytes
        self._replies: dict[UnreadReply, None] = {}

    def open(self, network: str, end: Callable[[], None]) -> UnreadReply:
        """Returns the account of a new reply; `close` it."""
        reply = UnreadReply(self, network, end)
        self._replies[reply] = None
        return reply

    def close(self, reply: UnreadReply) -> None:
        """Drops an account: nothing is held any longer."""
        if reply.is_counted:
            reply.is_counted = False
            del self._replies[reply]
            self.num_bytes -= reply.num_bytes

    def change(self, num_bytes: int) -> None:
        """Called by accounts with the change of their bytes."""
        self.num_bytes += num_bytes
        while num_bytes > 0 and self.num_bytes > self._limit_bytes and (victim := self._find_victim()) is not None:
            self.end(victim)

    def end(self, reply: UnreadReply) -> None:
        """Ends a reply. Its bytes are released soon and no longer count."""
        self.close(reply)
        reply.finish()

    def _find_victim(self) -> UnreadReply | None:
        large = [reply for reply in self._replies if reply.num_bytes > LEAST_VICTIM_BYTES]
        return self._find_largest([reply for reply in large if reply.is_slow] or large)

    def _find_largest(self, replies: Sequence[UnreadReply]) -> UnreadReply | None:
        held: dict[str, int] = {}
        for reply in self._replies:
            held[reply.network] = held.get(reply.network, 0) + reply.num_bytes
        return max(replies, key=lambda reply: (held[reply.network], reply.num_bytes), default=None)


def attach_reply(scope: Scope, reply: UnreadReply) -> None:
    """Puts the account of its reply into a request's state."""
    scope.setdefault("state", {})[_STATE] = reply


def reply_of(scope: Scope) -> UnreadReply | None:
    """Returns the account of a request's reply; None if nothing bounds it."""
    reply = scope.get("state", {}).get(_STATE)
    return reply if isinstance(reply, UnreadReply) else None
