"""HPKE key encapsulation: DHKEM(X25519, HKDF-SHA256) (RFC 9180, section 4.1) and X-Wing (ML-KEM-768 with X25519, draft-ietf-
hpke-pq). No I/O, no clock."""

from __future__ import annotations

import hashlib
from typing import Final, Protocol

import pyhpke
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pyhpke import KEMId, KEMKeyPair
from pyhpke.kem import KEM

from cloister.trust.sealing.errors import UnsealError

SHARED_SECRET_BYTES: Final = 32
"""Nsecret of all supported mechanisms."""


class KemPrivateKey(Protocol):
    """The private key of a key pair, as OpenSSL objects."""

    @property
    def kem_id(self) -> int:
        """Number of its mechanism."""

    def public_bytes(self) -> bytes:
        """Returns the public key in the format of key configurations."""

    def decapsulate(self, enc: bytes) -> bytes:
        """Returns the shared secret of an encapsulated key, `SHARED_SECRET_BYTES`.

        Raises:
            UnsealError: `enc` is not an encapsulated key, or has a predictable secret.
        """


class Kem(Protocol):
    """A key encapsulation mechanism.

    Attributes:
        kem_id: number in IANA's registry of HPKE KEM identifiers.
        name: for messages.
        public_key_bytes, enc_bytes: lengths of a public key and of an encapsulated key (Npk, Nenc).
        is_post_quantum: whether it is considered secure against quantum computers.
    """

    kem_id: int
    name: str
    public_key_bytes: int
    enc_bytes: int
    is_post_quantum: bool

    def generate(self) -> KemPrivateKey:
        """Draws a key pair."""

    def encapsulate(self, public_key: bytes, ephemeral: bytes | None = None) -> tuple[bytes, bytes]:
        """Returns a shared secret, and the encapsulated key from which the holder of the private key derives it.

        Args:
            ephemeral: private key to encapsulate with, if the mechanism supports it; for test vectors only.

        Raises:
            ValueError: the public key is invalid, or of low order.
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


# X-Wing: ML-KEM-768 and X25519 in one mechanism, MLKEM768-X25519 of draft-ietf-hpke-pq. No I/O, no clock.
#
# Its shared secret is secure while either of the two is. ML-KEM, X25519 and SHA3 are OpenSSL's. This module only adds the
# combiner of draft-connolly-cfrg-xwing-kem, section 5.3: the library supports X-Wing only for single-shot messages, without the
# exported secrets from which OHTTP derives its responses.


_LABEL: Final = bytes.fromhex("5c2e2f2f5e5c")
"""`XWingLabel`, an ASCII drawing."""
_ML_KEM_PUBLIC_BYTES: Final = 1184
_ML_KEM_CIPHERTEXT_BYTES: Final = 1088
_X25519_BYTES: Final = 32


class XWingKey:
    """A private key. The two halves are drawn separately: a common seed is needed only to store a key."""

    def __init__(self, ml_kem: MLKEM768PrivateKey, x25519: X25519PrivateKey) -> None:
        self._ml_kem = ml_kem
        self._x25519 = x25519

    @property
    def kem_id(self) -> int:
        return XWING.kem_id

    def public_bytes(self) -> bytes:
        return self._ml_kem.public_key().public_bytes_raw() + self._x25519.public_key().public_bytes_raw()

    def decapsulate(self, enc: bytes) -> bytes:
        """Returns the shared secret. For a changed ML-KEM ciphertext it is pseudorandom (implicit rejection, FIPS 203)."""
        ciphertext, point = enc[:_ML_KEM_CIPHERTEXT_BYTES], enc[_ML_KEM_CIPHERTEXT_BYTES:]
        try:
            ml_kem_secret = self._ml_kem.decapsulate(ciphertext)
            x25519_secret = self._x25519.exchange(X25519PublicKey.from_public_bytes(point))
        except ValueError:
            raise UnsealError from None
        return _combine(ml_kem_secret, x25519_secret, point, self._x25519.public_key().public_bytes_raw())


class _XWing:
    kem_id = 0x647A
    name = "X-Wing (ML-KEM-768 and X25519)"
    public_key_bytes = _ML_KEM_PUBLIC_BYTES + _X25519_BYTES
    enc_bytes = _ML_KEM_CIPHERTEXT_BYTES + _X25519_BYTES
    is_post_quantum = True

    def generate(self) -> XWingKey:
        return XWingKey(MLKEM768PrivateKey.generate(), X25519PrivateKey.generate())

    def encapsulate(self, public_key: bytes, ephemeral: bytes | None = None) -> tuple[bytes, bytes]:
        if ephemeral is not None:
            raise ValueError("OpenSSL draws the randomness of ML-KEM itself; X-Wing takes no ephemeral key")
        x25519_public = public_key[_ML_KEM_PUBLIC_BYTES:]
        ml_kem_secret, ciphertext = MLKEM768PublicKey.from_public_bytes(public_key[:_ML_KEM_PUBLIC_BYTES]).encapsulate()
        pair = X25519PrivateKey.generate()
        x25519_secret = pair.exchange(X25519PublicKey.from_public_bytes(x25519_public))
        point = pair.public_key().public_bytes_raw()
        return _combine(ml_kem_secret, x25519_secret, point, x25519_public), ciphertext + point


XWING: Final = _XWing()


def is_supported() -> bool:
    """Returns whether this machine's OpenSSL has ML-KEM; some distributions build `cryptography` with older versions."""
    try:
        MLKEM768PrivateKey.generate()
    except UnsupportedAlgorithm:
        return False
    return True


def _combine(ml_kem_secret: bytes, x25519_secret: bytes, point: bytes, public_key: bytes) -> bytes:
    return hashlib.sha3_256(ml_kem_secret + x25519_secret + point + public_key + _LABEL).digest()


# The supported mechanisms in order of preference: post-quantum first, if OpenSSL has ML-KEM.


KEMS: Final[tuple[Kem, ...]] = (XWING, X25519) if is_supported() else (X25519,)
"""Offered and accepted mechanisms, in order of preference. Every client makes the same choice."""
_BY_ID: Final = {kem.kem_id: kem for kem in KEMS}


def find_kem(kem_id: int) -> Kem | None:
    """Returns the mechanism with this number; None if unsupported."""
    return _BY_ID.get(kem_id)
