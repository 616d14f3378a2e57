"""The issuer: signs blinded messages for an API key, with quotas per key in SQLite."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cloister.policy.credentials import Credentials
from cloister.trust.tokens.challenge import MalformedTokenError
from cloister.trust.tokens.issuance import DirectoryKey, TokenRequest, encode_directory, evaluate
from cloister.trust.tokens.issuer_keys import EPOCH_S, IssuerKey, KeyShelf
from cloister.trust.tokens.stores.sqlite import connect
from cloister.types.errors import AuthenticationError, CloisterError, InvalidRequestError, RateLimitError

# The issuer's quotas: tokens issued per API key and issuer key. SQLite, counts only.
#
# A batch that arrives again, because its reply was lost or it was replayed, is counted once: it is identified by a digest, and
# blind signatures of one message are equal. The database holds no blinded messages, no times and nothing about the use of
# tokens.


_TABLE = """
CREATE TABLE IF NOT EXISTS issued (
    epoch INTEGER NOT NULL, holder BLOB NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (epoch, holder)
) WITHOUT ROWID
"""
_BATCHES = """
CREATE TABLE IF NOT EXISTS batches (
    epoch INTEGER NOT NULL, batch BLOB NOT NULL, times INTEGER NOT NULL, PRIMARY KEY (epoch, batch)
) WITHOUT ROWID
"""
_ASK = """
INSERT INTO batches VALUES (:epoch, :batch, 1)
ON CONFLICT DO UPDATE SET times = times + 1 WHERE times < :most_times RETURNING times
"""
_TAKE = """
INSERT INTO issued SELECT :epoch, :holder, :count WHERE :count <= :most
ON CONFLICT DO UPDATE SET count = count + excluded.count WHERE count + excluded.count <= :most
"""

MOST_TIMES = 8
"""How often one batch is signed: a reply may be lost again, but repeated signing costs only the issuer."""


class QuotaStoreError(CloisterError):
    """The database does not respond; no token was issued."""

    code = "issuer_unavailable"
    status = 503


class QuotaBook:
    """Counts tokens by epoch and holder of an API key. Safe for several threads and processes."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = connect(path, _TABLE)
        self._database.execute(_BATCHES)

    def take(self, epoch: int, holder: bytes, count: int, *, batch: bytes, most: int, retry_after_s: float) -> None:
        """Counts `count` more tokens before they are signed, so that a crash in between issues none.

        Args:
            holder: digest of the API key.
            batch: digest of the holder and all messages to sign; counted only once.
            most: limit of one holder in one epoch.
            retry_after_s: seconds until the next epoch.

        Raises:
            RateLimitError: the limit would be exceeded, or the batch was already sent `MOST_TIMES`; nothing was counted.
            QuotaStoreError: the database does not respond.
        """
        values = {"epoch": epoch, "holder": holder, "count": count, "most": most, "batch": batch, "most_times": MOST_TIMES}
        with self._lock:
            try:
                taken = self._take_once(values)
            except sqlite3.Error as error:
                raise _unavailable(error) from None
        if not taken:
            message = (
                f"this key may have {most:,} tokens in an epoch of the issuer, and one batch {MOST_TIMES} times; ask for "
                "fewer, draw another batch, or wait for the next epoch"
            )
            raise RateLimitError(message, retry_after_s=retry_after_s)

    def forget(self, epoch: int) -> None:
        """Drops the counts of epochs before this one.

        Raises:
            QuotaStoreError: the database does not respond.
        """
        with self._lock:
            try:
                for table in ("issued", "batches"):
                    self._database.execute(f"DELETE FROM {table} WHERE epoch < ?", (epoch,))
            except sqlite3.Error as error:
                raise _unavailable(error) from None

    def _take_once(self, values: dict[str, object]) -> bool:
        """Counts and records the batch atomically; other threads and processes of the same database wait."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            asked = self._database.execute(_ASK, values).fetchone()
            is_again = asked is not None and asked[0] > 1
            is_taken = is_again or (asked is not None and self._database.execute(_TAKE, values).rowcount == 1)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT" if is_taken else "ROLLBACK")
        return is_taken

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _unavailable(error: sqlite3.Error) -> QuotaStoreError:
    return QuotaStoreError(f"the issuer's book gives no answer ({type(error).__name__}); try again later")


REFRESH_S = 60.0
"""Refresh interval of the key directory: for timely rotation, and to notice changes by another `cloister issuer`."""


@dataclass(frozen=True, slots=True)
class IssuerLimits:
    """Limits of one API key.

    Attributes:
        tokens_per_epoch: tokens in one epoch of the issuer (seven days).
    """

    tokens_per_epoch: int = 1000


class Issuer:
    """Issues tokens. Safe to use from several threads.

    Args:
        credentials: returns the API keys; called at every request, so that a removed key gets no more tokens.
        now: Unix seconds.
    """

    def __init__(
        self,
        shelf: KeyShelf,
        book: QuotaBook,
        credentials: Callable[[], Credentials],
        limits: IssuerLimits,
        *,
        now: Callable[[], float],
    ) -> None:
        self._shelf, self._book, self._credentials, self._limits, self._now = shelf, book, credentials, limits, now
        self._lock = threading.Lock()
        self._keys: list[IssuerKey] = []
        self._read_at = -REFRESH_S

    def current_keys(self) -> list[IssuerKey]:
        """Returns the current keys, oldest first: one that is still accepted, the signing one, the next one."""
        return self._keys_at(self._now())

    def directory(self, request_uri: str) -> bytes:
        """Returns the directory. The signing key comes first, because clients use the first valid one."""
        now = self._now()
        keys = sorted(self._keys_at(now), key=lambda key: (key.issues_until <= now, key.epoch))
        return encode_directory(
            request_uri, [DirectoryKey(key.encoded, key.issues_from, key.taken_until, key.budget) for key in keys]
        )

    def issue(self, api_key: str | None, requests: list[TokenRequest]) -> list[bytes]:
        """Returns one signature for each request, all or none; a repeated batch gets the same ones without a further charge.

        Raises:
            AuthenticationError: the API key is invalid.
            InvalidRequestError: a request names a key that does not sign now, or does not fit it.
            RateLimitError: the quota of the key in this epoch is used up.
            QuotaStoreError: the quota database does not respond.
            BlindSignatureError: a computation on this machine failed.
        """
        credential = None if api_key is None else self._credentials().find(api_key)
        if credential is None:
            raise AuthenticationError("send an API key of the issuer: Authorization: Bearer KEY")
        now = self._now()
        key = next((key for key in self._keys_at(now) if key.issues_from <= now < key.issues_until), None)
        if key is None or key.private is None:
            raise AssertionError("turning the shelf leaves a key that signs")
        if any(request.truncated_key_id != key.key_id[-1] for request in requests):
            raise InvalidRequestError("this request is for another key than the one that signs now; read the directory again")
        if any(int.from_bytes(request.blinded, "big") >= key.private.public.n for request in requests):
            raise InvalidRequestError("a blinded message is not below the modulus of the key")
        most, left = self._limits.tokens_per_epoch, key.issues_until - now
        batch = hashlib.sha256(credential.digest + b"".join(request.encode() for request in requests)).digest()
        self._book.take(key.epoch, credential.digest, len(requests), batch=batch, most=most, retry_after_s=left)
        try:
            return [evaluate(key.private, request) for request in requests]
        except MalformedTokenError as error:
            raise InvalidRequestError(str(error)) from None

    def _keys_at(self, now: float) -> list[IssuerKey]:
        with self._lock:
            if now - self._read_at >= REFRESH_S or now // EPOCH_S != self._read_at // EPOCH_S:
                self._keys = self._shelf.turn(now)
                self._book.forget(int(now) // EPOCH_S)
                self._read_at = now
            return self._keys
