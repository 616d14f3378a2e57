"""The protocol of spend stores, which accept a token once, and the expiry of records of spent tokens.

A record is the digest of a token under its issuer's key, with the expiry of the key's tokens. No account, address, time of
spending or order is stored. The issuer's quotas are in a separate database: the two share no value by which they could be
linked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

from cloister.trust.tokens.challenge import Token
from cloister.types.errors import CloisterError, ConfigError
from cloister.types.extras import install_command

WAIT_S = 5.0
"""Timeout of a store, after which the request is refused."""


class SpendStoreError(CloisterError):
    """The store did not respond. The token may count as spent; the request was refused."""

    code = "spend_store_unavailable"
    status = 503


class SpendStore(Protocol):
    """Records spent tokens. Safe for any number of threads, processes and machines."""

    def spend(self, key_id: bytes, token_digest: bytes, expires_at: int) -> bool:
        """Records a token durably before it returns. Returns True for the first caller only, and False for every token of a key
        whose records were dropped.

        Args:
            key_id: the issuer key's, 32 bytes.
            token_digest: 32 bytes.
            expires_at: Unix seconds; from then on no token of the key is accepted, and its records may be dropped.

        Raises:
            SpendStoreError: no response within `WAIT_S`; the caller refuses the request.
        """

    def forget(self, now: int) -> None:
        """Drops the records of keys whose tokens ended by `now` (Unix seconds), and refuses those keys from then on.

        Atomic: a clock that is set back cannot make a key valid again after its records were dropped. `Expiry` schedules it.

        Raises:
            SpendStoreError: no response within `WAIT_S`; nothing was dropped.
        """

    def note_epoch(self, log: str, known: int, number: int) -> bool:
        """Records durably that a gateway is at an epoch of its log. Returns False, and records nothing, if the store has not
        seen the epoch `known`: it is an older copy, or another store, and lacks tokens that were spent since.

        Args:
            log: the log's origin.
            known: number of an epoch that this store must have seen; 0 asks for none.
            number: of the epoch that follows, or `known` itself.

        Raises:
            SpendStoreError: no response within `WAIT_S`.
        """

    def close(self) -> None:
        """Closes files and connections."""


def digest_of(token: Token) -> bytes:
    """Returns a token's digest in a store: SHA-256 of the bytes that its issuer signed.

    It excludes the signature, so two signatures of one nonce count as one token.
    """
    return hashlib.sha256(b"cloister spent token v1\n" + token.signed).digest()


OLDER_STORE: Final = (
    "the spend store does not know epoch {epoch}, which is in the log {log}: it is an older copy, a new one, or written by a "
    "version before this check. From an older copy or a new one tokens that were spent since could be spent again, so name the "
    "store that the gateway had. --accept-store {epoch} goes on with this one: if it is the right one, nothing is lost; if the "
    "right one is lost, such tokens pay once more, for eight days at most"
)
"""Message of a refusal, to format."""


def check_epoch(store: SpendStore, log: str, known: int, number: int) -> None:
    """Records an epoch in a store, which must have seen an earlier one (`SpendStore.note_epoch`).

    Raises:
        ConfigError: it has not.
        SpendStoreError: it does not respond.
    """
    if not store.note_epoch(log, known, number):
        raise ConfigError(OLDER_STORE.format(epoch=known, log=log), param="spend_store")


def missing_extra(library: str) -> ConfigError:
    """The error for a missing client library of a store."""
    return ConfigError(f"this spend store needs {library}; install it with: {install_command('stores')}", param="spend_store")


# Expiry of spent-token records, by a wall clock that is trusted only after an hour of agreement with uptime.
#
# A wall clock can be set forward by mistake (NTP, a virtual machine that resumes, an operator) and back again. Dropping records
# in between would lose the proof that tokens were spent. Two rules prevent this:


SETTLE_S: Final = 3600
"""How long the wall clock must not go back before its time is trusted."""
LOOK_S: Final = 300.0

_logger = logging.getLogger(__name__)


class Expiry:
    """Drops the records of expired keys in a store.

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
        """Drops records that expired before a settled time; call it periodically, at least every `SETTLE_S`.

        Raises:
            SpendStoreError: the store does not respond.
        """
        wall, uptime = self._wall(), self._monotonic()
        if self._shown is not None and wall >= self._shown:
            if uptime - self._shown_since < SETTLE_S:
                return
            self._store.forget(int(self._shown))
        self._shown, self._shown_since = wall, uptime

    async def run_forever(self) -> None:
        """Runs every five minutes until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.drop_ended)
            except SpendStoreError as error:
                _logger.warning("records of ended keys stay for now: %s", error.message)
            await asyncio.sleep(LOOK_S)
