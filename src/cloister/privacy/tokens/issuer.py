"""The issuer: an API key and blinded messages in, signatures out. What it sees is who asks for how many; nothing of a token."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cloister.privacy.credentials import Credentials
from cloister.privacy.tokens.challenge import MalformedTokenError
from cloister.privacy.tokens.issuance import DirectoryKey, TokenRequest, encode_directory, evaluate
from cloister.privacy.tokens.issuer_keys import EPOCH_S, IssuerKey, KeyShelf
from cloister.privacy.tokens.quota import QuotaBook
from cloister.types.errors import AuthenticationError, InvalidRequestError

REFRESH_S = 60.0
"""How often the directory of keys is read again: keys turn on time, and `cloister issuer` beside it is heard."""


@dataclass(frozen=True, slots=True)
class IssuerLimits:
    """What one API key gets.

    Attributes:
        tokens_per_epoch: tokens in one epoch of the issuer (seven days).
    """

    tokens_per_epoch: int = 1000


class Issuer:
    """Issues tokens. Safe to use from several threads.

    Args:
        credentials: who may ask, read anew at every request, so that a removed key gets nothing more.
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
        """Returns the keys that hold now, oldest first: one that is still taken, the one that signs, the next one."""
        return self._keys_at(self._now())

    def directory(self, request_uri: str) -> bytes:
        """Returns the directory. First the key that signs, as clients take the first one whose time has come."""
        now = self._now()
        keys = sorted(self._keys_at(now), key=lambda key: (key.issues_until <= now, key.epoch))
        return encode_directory(
            request_uri, [DirectoryKey(key.encoded, key.issues_from, key.taken_until, key.budget) for key in keys]
        )

    def issue(self, api_key: str | None, requests: list[TokenRequest]) -> list[bytes]:
        """Returns one signature for each request, all or none; the same ones, at no further cost, for a batch that comes again.

        Raises:
            AuthenticationError: this is no API key.
            InvalidRequestError: a request names a key that does not sign now, or does not fit it.
            RateLimitError: the key had its tokens in this epoch.
            QuotaStoreError: the book gives no answer.
            BlindSignatureError: this machine computed a signature wrong.
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
