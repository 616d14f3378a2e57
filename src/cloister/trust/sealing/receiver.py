"""Holds the private keys, opens each request once, and rejects replays. Time is an argument."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import Final

from cloister.trust.sealing.errors import ReplayCacheFullError, UnsealError
from cloister.trust.sealing.hpke import (
    HKDF_SHA256_AES_128_GCM,
    SUITES,
    Context,
    derive_decoy,
    derive_secrets,
    set_up_receiver,
)
from cloister.trust.sealing.kem import KEMS, SHARED_SECRET_BYTES, X25519, KemPrivateKey
from cloister.trust.sealing.keys import NODE_KEY_LIFE_S, RECEIPT_GRACE_S, KeyRing
from cloister.trust.sealing.ohttp import Form, Header, OhttpContext

# Replay protection: remembers opened messages, bounded in time and number; when full it refuses messages instead of dropping
# records. No I/O, no clock.


DEFAULT_CAPACITY: Final = 1_000_000
"""Maximum number of remembered messages; about 200 bytes each."""


class ReplayCache:
    """Remembers encapsulated keys: each message has a fresh one, so a repeated one is a replay (RFC 9458, 6.5.1).

    Stores their SHA-256, because those of X-Wing have 1,120 bytes.

    Args:
        window_s: how long a message could be accepted after it was first seen; it is remembered for as long.
        capacity: maximum number of records. When full, new messages are refused until old ones leave the window: a record that
            was dropped early would permit a replay.
    """

    def __init__(self, window_s: float, capacity: int = DEFAULT_CAPACITY) -> None:
        self._window_s = window_s
        self._capacity = capacity
        self._seen_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen_s)

    def has_seen(self, enc: bytes, now_s: float) -> bool:
        """Returns whether a message with this encapsulated key was opened within the window."""
        self._expire(now_s)
        return _digest(enc) in self._seen_s

    def check_room(self, now_s: float) -> None:
        """Raises `ReplayCacheFullError` if no further message can be remembered."""
        self._expire(now_s)
        if len(self._seen_s) >= self._capacity:
            raise ReplayCacheFullError("The receiver has as many requests as it can keep apart; try again in a moment.")

    def remember(self, enc: bytes, now_s: float) -> None:
        """Records an opened message. Of two concurrent copies, only one is accepted.

        Raises:
            UnsealError: it was already recorded.
            ReplayCacheFullError: the cache is full.
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


class Receiver:
    """A ring of keys, with the requests that they opened.

    `begin` returns a context for every header: if the header names an unknown key, is a replay, or is malformed, the context
    belongs to a key that no client seals to. So all failures occur at the same point, when the first chunk does not open, and
    take equally long for a KEM, which the sender chose. Call `accept` once the first chunk has opened: only then is the request
    known to be valid, so that noise cannot fill the cache.
    """

    def __init__(self, ring: KeyRing, replays: ReplayCache) -> None:
        self.ring = ring
        self._replays = replays
        self._signed = ReplayCache(NODE_KEY_LIFE_S + RECEIPT_GRACE_S)
        self._decoys = {kem.kem_id: kem.generate() for kem in KEMS}
        self._decoy_secret = secrets.token_bytes(SHARED_SECRET_BYTES)

    def begin(self, header: Header, form: Form, now_s: float) -> OhttpContext:
        """Returns the exchange that opens the request with this header, if any does.

        Raises:
            ReplayCacheFullError: the cache is full.
        """
        self.ring.rotate(now_s)
        self._replays.check_room(now_s)
        key = self.ring.find(header.key_id, now_s)
        suites = key.configuration.suites if key is not None else SUITES
        decoy = self._decoys.get(header.kem_id, self._decoys[X25519.kem_id])
        checks = (  # evaluate all of them, whichever fails
            key is not None,
            key is not None and header.kem_id == key.configuration.kem_id,
            header.suite in suites,
            not self._replays.has_seen(header.enc, now_s),
        )
        private_key = key.private_key if key is not None and all(checks) else decoy
        return OhttpContext(form, header, self._context(header, private_key, form))

    def accept(self, header: Header, now_s: float) -> None:
        """Accepts a request whose first chunk has opened.

        Raises:
            UnsealError: it was accepted before.
            ReplayCacheFullError: the cache is full.
        """
        self._replays.remember(header.enc, now_s)

    def sign(self, header: Header, message: bytes, now_s: float) -> bytes:
        """Signs the receipt of an accepted request, with the receipt key that belongs to its sealing key (Ed25519).

        Each request gets one signature, so that a worker captured by its request cannot sign more.

        Raises:
            UnsealError: no such request was accepted, it already has its receipt, or its key was destroyed.
            ReplayCacheFullError: the cache is full.
        """
        key = self.ring.find_receipt_key(header.key_id, now_s)
        if key is None or not self._replays.has_seen(header.enc, now_s):
            raise UnsealError
        self._signed.remember(header.enc, now_s)
        return key.sign(message)

    def _context(self, header: Header, private_key: KemPrivateKey, form: Form) -> Context:
        suite = header.suite if header.suite in SUITES else HKDF_SHA256_AES_128_GCM
        try:
            return set_up_receiver(header.enc, private_key, suite, header.info(form))
        except UnsealError:  # a point of low order, chosen by the sender; takes equally long
            kem_id = private_key.kem_id
            decoy = derive_decoy(kem_id, suite, self._decoy_secret, header.enc)
            return Context(derive_secrets(kem_id, suite, decoy, header.info(form)))
