"""Messages that were opened already. Bounded in time and number, and refuses rather than forgets. No I/O, no clock."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from cloister.privacy.sealing.errors import ReplayCacheFullError, UnsealError

DEFAULT_CAPACITY: Final = 1_000_000
"""Messages that are remembered at once; about 200 bytes each."""


class ReplayCache:
    """Remembers encapsulated keys: each is drawn anew for each message, so one that comes again is a copy (RFC 9458, 6.5.1).

    It keeps their SHA-256: those of X-Wing have 1,120 bytes.

    Args:
        window_s: how long a message could be accepted after it was first seen; it is remembered as long.
        capacity: how many are remembered. At that number new messages are refused until old ones leave the window: one that was
            forgotten early could be sent again.
    """

    def __init__(self, window_s: float, capacity: int = DEFAULT_CAPACITY) -> None:
        self._window_s = window_s
        self._capacity = capacity
        self._seen_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_s)

    def has_seen(self, enc: bytes, now_s: float) -> bool:
        """Says whether a message with this encapsulated key was opened within the window."""
        self._expire(now_s)
        return _digest(enc) in self._seen_s

    def check_room(self, now_s: float) -> None:
        """Raises `ReplayCacheFullError` when no further message could be remembered."""
        self._expire(now_s)
        if len(self._seen_s) >= self._capacity:
            raise ReplayCacheFullError("The receiver has as many requests as it can keep apart; try again in a moment.")

    def remember(self, enc: bytes, now_s: float) -> None:
        """Takes in a message that has been opened. Of two at the same moment, one is taken in.

        Raises:
            UnsealError: it was there already.
            ReplayCacheFullError: there is no room.
        """
        if self.has_seen(enc, now_s):
            raise UnsealError
        self.check_room(now_s)
        self._seen_s[_digest(enc)] = now_s

    def _expire(self, now_s: float) -> None:
        while self._seen_s:
            digest, seen_s = next(iter(self._seen_s.items()))
            if now_s - seen_s <= self._window_s:
                return
            del self._seen_s[digest]


def _digest(enc: bytes) -> bytes:
    return hashlib.sha256(enc).digest()
