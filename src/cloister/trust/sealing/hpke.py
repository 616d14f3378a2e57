"""Hybrid public key encryption, RFC 9180, in base mode: key derivation by pyhpke, contexts of our own.

A context opens one request. Its `ContextSecrets` are plain bytes for one request, so that a process with the private key can
pass them to one that reads the content.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from pyhpke import AEADId, KDFId
from pyhpke.aead import AEAD
from pyhpke.kdf import KDF

from cloister.trust.sealing.errors import UnsealError
from cloister.trust.sealing.kem import SHARED_SECRET_BYTES, Kem, KemPrivateKey

TAG_BYTES: Final = 16
"""Tag length of all supported ciphers (Nt)."""
NONCE_BYTES: Final = 12
"""Nn of all supported ciphers."""
_MODE_BASE: Final = b"\x00"


@dataclass(frozen=True)
class Suite:
    """The algorithms used with a KEM: a key derivation and a cipher, by their numbers in RFC 9180, section 7."""

    kdf_id: int
    aead_id: int

    @cached_property
    def aead(self) -> AEAD:
        return AEAD(AEADId(self.aead_id))

    @property
    def key_bytes(self) -> int:
        """Nk."""
        return self.aead.key_size

    @property
    def secret_bytes(self) -> int:
        """Length of the secret and the nonce of a response, max(Nn, Nk) (RFC 9458, section 4.4)."""
        return max(self.key_bytes, NONCE_BYTES)


HKDF_SHA256_AES_128_GCM: Final = Suite(KDFId.HKDF_SHA256.value, AEADId.AES128_GCM.value)
HKDF_SHA256_CHACHA20_POLY1305: Final = Suite(KDFId.HKDF_SHA256.value, AEADId.CHACHA20_POLY1305.value)
HKDF_SHA256_AES_256_GCM: Final = Suite(KDFId.HKDF_SHA256.value, AEADId.AES256_GCM.value)
SUITES: Final = (HKDF_SHA256_AES_128_GCM, HKDF_SHA256_CHACHA20_POLY1305, HKDF_SHA256_AES_256_GCM)
"""Offered and accepted suites, in order of preference."""


@dataclass(frozen=True, slots=True)
class ContextSecrets:
    """The output of the key schedule (RFC 9180, section 5.1).

    Attributes:
        kem_id, suite: the three algorithms, to whose ids all derived values are bound.
        key: the cipher's key, `suite.key_bytes`.
        base_nonce: `NONCE_BYTES`.
        exporter: from which further secrets of this context are derived.
    """

    kem_id: int
    suite: Suite
    key: bytes
    base_nonce: bytes
    exporter: bytes

    def __repr__(self) -> str:
        return f"ContextSecrets({self.kem_id:#06x}, {self.suite})"


class Cipher(Protocol):
    """An AEAD with its key."""

    def seal(self, pt: bytes, nonce: bytes, aad: bytes = b"") -> bytes: ...

    def open(self, ct: bytes, nonce: bytes, aad: bytes = b"") -> bytes: ...


class HpkeContext:
    """Seals or opens consecutive pieces, each with the nonce of its index, so that order and number cannot change.

    Used for contexts of HPKE (RFC 9180, section 5.2) and for chunked responses, which count in the same way.
    """

    def __init__(self, cipher: Cipher, base_nonce: bytes) -> None:
        self._cipher = cipher
        self._base = int.from_bytes(base_nonce, "big")
        self._count = 0

    def seal(self, plaintext: bytes, aad: bytes = b"") -> bytes:
        """Returns the sealed piece, `TAG_BYTES` longer."""
        return self._cipher.seal(plaintext, self._next_nonce(), aad)

    def open(self, sealed: bytes, aad: bytes = b"") -> bytes:
        """Returns the plaintext.

        Raises:
            UnsealError: the piece was changed.
        """
        nonce = self._next_nonce()
        try:
            return self._cipher.open(sealed, nonce, aad)
        except (InvalidTag, ValueError):
            raise UnsealError from None

    def _next_nonce(self) -> bytes:
        nonce = (self._base ^ self._count).to_bytes(NONCE_BYTES, "big")
        self._count += 1  # 2^96 pieces are never reached; to_bytes would fail for the next
        return nonce


class Context(HpkeContext):
    """One side of one exchange.

    Attributes:
        secrets: its secrets, which suffice to open and seal as this context does.
    """

    def __init__(self, secrets: ContextSecrets) -> None:
        self.secrets = secrets
        super().__init__(new_cipher(secrets.suite, secrets.key), secrets.base_nonce)

    def export(self, label: bytes, length: int) -> bytes:
        """Returns `length` bytes that both sides can derive (RFC 9180, section 5.3)."""
        return kdf_of(self.secrets.kem_id, self.secrets.suite).labeled_expand(self.secrets.exporter, b"sec", label, length)


def new_cipher(suite: Suite, key: bytes) -> Cipher:
    """Returns the suite's cipher with a key."""
    return suite.aead.import_key(key)


@lru_cache(maxsize=64)
def kdf_of(kem_id: int, suite: Suite) -> KDF:
    """Returns the key derivation, bound to the names of all three algorithms."""
    suite_id = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in (kem_id, suite.kdf_id, suite.aead_id))
    return KDF(KDFId(suite.kdf_id), suite_id)


def set_up_sender(
    kem: Kem, public_key: bytes, suite: Suite, info: bytes, ephemeral: bytes | None = None
) -> tuple[bytes, Context]:
    """Returns an encapsulated key and the context that seals for the holder of `public_key` (SetupBaseS).

    Args:
        public_key: of `kem`, `kem.public_key_bytes`.
        ephemeral: private key to encapsulate with; for test vectors only; None draws one.

    Raises:
        ValueError: the public key is invalid, or of low order.
    """
    shared_secret, enc = kem.encapsulate(public_key, ephemeral)
    return enc, Context(derive_secrets(kem.kem_id, suite, shared_secret, info))


def set_up_receiver(enc: bytes, private_key: KemPrivateKey, suite: Suite, info: bytes) -> Context:
    """Returns the context that opens what was sealed with the encapsulated key `enc` (SetupBaseR).

    Raises:
        UnsealError: `enc` is not an encapsulated key, or is of low order.
    """
    return Context(derive_secrets(private_key.kem_id, suite, private_key.decapsulate(enc), info))


def derive_decoy(kem_id: int, suite: Suite, secret: bytes, enc: bytes) -> bytes:
    """Returns a random shared secret, in the time that the step after a key exchange takes."""
    return kdf_of(kem_id, suite).extract_and_expand(b"", secret, enc, SHARED_SECRET_BYTES)


def derive_secrets(kem_id: int, suite: Suite, shared_secret: bytes, info: bytes) -> ContextSecrets:
    """KeySchedule without a pre-shared key (RFC 9180, section 5.1)."""
    kdf = kdf_of(kem_id, suite)
    context = _MODE_BASE + kdf.labeled_extract(b"", b"psk_id_hash", b"") + kdf.labeled_extract(b"", b"info_hash", info)
    secret = kdf.labeled_extract(shared_secret, b"secret", b"")
    return ContextSecrets(
        kem_id,
        suite,
        key=kdf.labeled_expand(secret, b"key", context, suite.key_bytes),
        base_nonce=kdf.labeled_expand(secret, b"base_nonce", context, NONCE_BYTES),
        exporter=kdf.labeled_expand(secret, b"exp", context, kdf.digest_size),
    )
