"""The protocol of spend stores, which accept a token once; and when records of spent tokens expire.

A record is the digest of a token under its issuer's key, and when the key's tokens end. No account, address, time of spending
or order is kept, and the issuer keeps its own book (`quota`) elsewhere: the two have no value in common that could join them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

from cloister.trust.tokens.challenge import Token
from cloister.types.errors import CloisterError, ConfigError

WAIT_S = 5.0
"""How long a store may take before the request is refused."""


class SpendStoreError(CloisterError):
    """The store gave no answer. The token may count as spent; nothing was let through."""

    code = "spend_store_unavailable"
    status = 503


class SpendStore(Protocol):
    """Remembers spent tokens. Safe to use from any number of threads, processes and machines at once."""

    def spend(self, key_id: bytes, token_digest: bytes, expires_at: int) -> bool:
        """Takes a token down, for good before this returns. True for the first caller ever, False for everybody after, and for
        every token of a key whose records were dropped.

        Args:
            key_id: the issuer key's, 32 bytes.
            token_digest: 32 bytes.
            expires_at: Unix seconds; from then on no token of the key is taken, and its records may go.

        Raises:
            SpendStoreError: no answer within `WAIT_S`; the caller refuses the request.
        """

    def forget(self, now: int) -> None:
        """Drops the records of keys whose tokens ended by `now` (Unix seconds), and refuses those keys from then on.

        Both in one step: no clock that is set back can make a key good again whose records are gone. `Expiry` says when.

        Raises:
            SpendStoreError: no answer within `WAIT_S`; nothing was dropped.
        """

    def close(self) -> None:
        """Lets go of files and connections."""


def digest_of(token: Token) -> bytes:
    """Returns what stands for a token in a store: SHA-256 of what its issuer signed.

    Not of the signature: whoever got two signatures of one nonce has two tokens to pay for and one to spend.
    """
    return hashlib.sha256(b"cloister spent token v1\n" + token.signed).digest()


def missing_extra(library: str) -> ConfigError:
    """The error when a store's client library is not there."""
    return ConfigError(
        f"this spend store needs {library}; install it with: pip install 'cloister[stores]'", param="spend_store"
    )


# Expiry of spent-token records, by a wall clock that is trusted only after an hour of agreement with uptime.
#
# A wall clock can be set forward by mistake (NTP, a virtual machine that resumes, an operator) and back again. Whoever drops
# records in between loses the proof that tokens were spent. Two rules hold that off:


SETTLE_S: Final = 3600
"""For how long the wall clock must not fall back before a time that it showed is believed."""
LOOK_S: Final = 300.0

_logger = logging.getLogger(__name__)


class Expiry:
    """Has a store drop the records of keys that ended.

    Args:
        wall: Unix seconds; may jump.
        monotonic: seconds since some moment; never jumps.
    """

    def __init__(self, store: SpendStore, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall
        self._monotonic = monotonic
        self._shown: float | None = None
        self._shown_since = 0.0

    def drop_ended(self) -> None:
        """Drops what ended by a time that has settled; called again and again, at least every `SETTLE_S`.

        Raises:
            SpendStoreError: the store gives no answer.
        """
        wall, uptime = self._wall(), self._monotonic()
        if self._shown is not None and wall >= self._shown:
            if uptime - self._shown_since < SETTLE_S:
                return
            self._store.forget(int(self._shown))
        self._shown, self._shown_since = wall, uptime

    async def run_forever(self) -> None:
        """Looks every five minutes until it is cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.drop_ended)
            except SpendStoreError as error:
                _logger.warning("records of ended keys stay for now: %s", error.message)
            await asyncio.sleep(LOOK_S)
