"""Key encapsulation of HPKE: a protocol, and DHKEM(X25519, HKDF-SHA256) of RFC 9180, section 4.1. No I/O, no clock."""

from __future__ import annotations

from typing import Final, Protocol

import pyhpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pyhpke import KEMId, KEMKeyPair
from pyhpke.kem import KEM

from cloister.privacy.sealing.errors import UnsealError

SHARED_SECRET_BYTES: Final = 32
"""Nsecret of each mechanism here."""


class KemPrivateKey(Protocol):
    """The private half of a key pair, in objects of OpenSSL."""

    @property
    def kem_id(self) -> int:
        """Number of the mechanism that it belongs to."""

    def public_bytes(self) -> bytes:
        """Returns the public key as a key configuration carries it."""

    def decapsulate(self, enc: bytes) -> bytes:
        """Returns the shared secret of an encapsulated key, `SHARED_SECRET_BYTES`.

        Raises:
            UnsealError: `enc` is no encapsulated key, or one whose secret everybody knows.
        """


class Kem(Protocol):
    """A key encapsulation mechanism.

    Attributes:
        kem_id: number in IANA's registry of HPKE KEM identifiers.
        name: for messages.
        public_key_bytes, enc_bytes: lengths of a public key and of an encapsulated key (Npk, Nenc).
        is_post_quantum: whether a quantum computer does not break it, as far as is known.
    """

    kem_id: int
    name: str
    public_key_bytes: int
    enc_bytes: int
    is_post_quantum: bool

    def generate(self) -> KemPrivateKey:
        """Draws a key pair."""

    def encapsulate(self, public_key: bytes, ephemeral: bytes | None = None) -> tuple[bytes, bytes]:
        """Returns a shared secret and the encapsulated key from which the holder of `public_key` derives it.

        Args:
            ephemeral: private key to encapsulate with, where the mechanism takes one; for official examples only.

        Raises:
            ValueError: the public key is none, or of low order.
        """


class X25519Key:
    """A key of DHKEM(X25519, HKDF-SHA256)."""

    def __init__(self, key: X25519PrivateKey) -> None:
        self._key = key

    @property
    def kem_id(self) -> int:
        return X25519.kem_id

    def public_bytes(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def decapsulate(self, enc: bytes) -> bytes:
        try:
            return X25519.kem.decap(enc, pyhpke.KEMKey.from_pyca_cryptography_key(self._key))
        except ValueError:
            raise UnsealError from None


class _X25519:
    kem_id = KEMId.DHKEM_X25519_HKDF_SHA256.value
    name = "DHKEM(X25519, HKDF-SHA256)"
    public_key_bytes = 32
    enc_bytes = 32
    is_post_quantum = False
    kem = KEM(KEMId.DHKEM_X25519_HKDF_SHA256)

    def generate(self) -> X25519Key:
        return X25519Key(X25519PrivateKey.generate())

    def encapsulate(self, public_key: bytes, ephemeral: bytes | None = None) -> tuple[bytes, bytes]:
        pair = None if ephemeral is None else _pair_of(ephemeral)
        return self.kem.encap(self.kem.deserialize_public_key(public_key), eks=pair)


X25519: Final = _X25519()


def _pair_of(private_bytes: bytes) -> KEMKeyPair:
    private_key = X25519PrivateKey.from_private_bytes(private_bytes)
    to_key = pyhpke.KEMKey.from_pyca_cryptography_key
    return KEMKeyPair(to_key(private_key), to_key(private_key.public_key()))
