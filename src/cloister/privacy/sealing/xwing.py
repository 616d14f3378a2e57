"""X-Wing: ML-KEM-768 and X25519 in one mechanism, MLKEM768-X25519 of draft-ietf-hpke-pq. No I/O, no clock.

Its shared secret stays secret while either of the two holds. ML-KEM, X25519 and SHA3 are OpenSSL's. What is here is the
combiner of draft-connolly-cfrg-xwing-kem, section 5.3: the library has X-Wing for messages that are sealed whole only, without
the exported secrets that OHTTP derives its responses from.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from cloister.privacy.sealing.errors import UnsealError

_LABEL: Final = bytes.fromhex("5c2e2f2f5e5c")
"""`XWingLabel`; a small picture."""
_ML_KEM_PUBLIC_BYTES: Final = 1184
_ML_KEM_CIPHERTEXT_BYTES: Final = 1088
_X25519_BYTES: Final = 32


class XWingKey:
    """A private key. The two halves are drawn separately: a seed of both is needed only where a key is stored."""

    def __init__(self, ml_kem: MLKEM768PrivateKey, x25519: X25519PrivateKey) -> None:
        self._ml_kem = ml_kem
        self._x25519 = x25519

    @property
    def kem_id(self) -> int:
        return XWING.kem_id

    def public_bytes(self) -> bytes:
        return self._ml_kem.public_key().public_bytes_raw() + self._x25519.public_key().public_bytes_raw()

    def decapsulate(self, enc: bytes) -> bytes:
        """Returns the shared secret. For a changed ML-KEM ciphertext that is one nobody has (implicit rejection, FIPS 203)."""
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
    """Says whether this machine's OpenSSL has ML-KEM; distributions build `cryptography` against older ones too."""
    try:
        MLKEM768PrivateKey.generate()
    except UnsupportedAlgorithm:
        return False
    return True


def _combine(ml_kem_secret: bytes, x25519_secret: bytes, point: bytes, public_key: bytes) -> bytes:
    return hashlib.sha3_256(ml_kem_secret + x25519_secret + point + public_key + _LABEL).digest()
