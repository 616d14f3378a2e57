"""RSA blind signatures (RFC 9474), and public keys of token type 2 as SubjectPublicKeyInfo. Pure but for random bytes.

Both variants in the test vectors: SHA-384 with a PSS salt of 48 bytes (used by Privacy Pass token type 2) and without salt.
Preparation is the identity: a token's message starts with 32 random bytes of the client (RFC 9578, section 6.1).

The time of Python's integer multiplication depends on the values. All secret values go through GMP's `powmod_sec`, whose memory
accesses are constant, and the signer also blinds its base, so that remaining leakage depends on its own random number.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import gmpy2
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

RandomBytes = Callable[[int], bytes]

SALT_BYTES = 48
_HASH_BYTES = 48
_PUBLIC_EXPONENT = 65537


class BlindSignatureError(Exception):
    """A message, blinded message or signature is invalid for the key; the text contains no values."""


@dataclass(frozen=True, slots=True)
class RsaPublicKey:
    """n and e.

    Attributes:
        num_bytes: length of a signature.
    """

    n: int
    e: int = _PUBLIC_EXPONENT

    @property
    def num_bits(self) -> int:
        return self.n.bit_length()

    @property
    def num_bytes(self) -> int:
        return (self.num_bits + 7) // 8

    def verify(self, message: bytes, signature: bytes, *, salt_bytes: int = SALT_BYTES) -> bool:
        """Whether an RSASSA-PSS signature is this key's (RFC 8017, section 8.1.2)."""
        if len(signature) != self.num_bytes:
            return False
        key = rsa.RSAPublicNumbers(self.e, self.n).public_key()
        try:
            key.verify(signature, message, padding.PSS(padding.MGF1(SHA384()), salt_bytes), SHA384())
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class RsaPrivateKey:
    """A signer's key: two primes, and derived values."""

    p: int = field(repr=False)
    q: int = field(repr=False)
    e: int = _PUBLIC_EXPONENT

    @property
    def public(self) -> RsaPublicKey:
        return RsaPublicKey(self.p * self.q, self.e)


@dataclass(frozen=True, slots=True)
class Blinding:
    """The client's state between `blind` and `finalize`."""

    message: bytes = field(repr=False)
    inverse: int = field(repr=False)


def generate(num_bits: int = 2048) -> RsaPrivateKey:
    """Draws a key."""
    numbers = rsa.generate_private_key(_PUBLIC_EXPONENT, num_bits).private_numbers()
    return RsaPrivateKey(numbers.p, numbers.q)


def blind(
    public: RsaPublicKey,
    message: bytes,
    *,
    salt: bytes | None = None,
    factor: int | None = None,
) -> tuple[bytes, Blinding]:
    """Returns the blinded message for the signer, and the state for `finalize` (RFC 9474, section 4.2).

    Args:
        salt: salt of the PSS encoding; None draws 48 bytes.
        factor: the blinding factor r; None draws it; other values are for test vectors.

    Raises:
        BlindSignatureError: the key is too small for the encoding, or shares a factor with a drawn number.
    """
    n = public.n
    encoded = int.from_bytes(encode(message, public.num_bits - 1, os.urandom(SALT_BYTES) if salt is None else salt), "big")
    if gmpy2.gcd(encoded, n) != 1:
        raise BlindSignatureError("the message cannot be blinded under this key")  # nobody ever sees this: it factors n
    drawn = _draw_unit(n) if factor is None else factor
    try:
        inverse = int(gmpy2.invert(drawn, n))
    except ZeroDivisionError:
        raise BlindSignatureError("the blinding factor has no inverse") from None
    blinded = encoded * int(gmpy2.powmod_sec(drawn, public.e, n)) % n
    return blinded.to_bytes(public.num_bytes, "big"), Blinding(message, inverse)


def blind_sign(private: RsaPrivateKey, blinded: bytes) -> bytes:
    """Signs a blinded message (RFC 9474, section 4.3): with CRT and a blinded base, and verifies the signature before returning
    it.

    A faulty computation modulo one of the primes would reveal the key (Boneh, DeMillo, Lipton 1997), so a signature that does
    not verify is never returned.

    Raises:
        BlindSignatureError: the message has another length, or is not below n.
    """
    public = private.public
    n = public.n
    message = int.from_bytes(blinded, "big")
    if len(blinded) != public.num_bytes or message >= n:
        raise BlindSignatureError("the blinded message does not fit the key")
    factor = _draw_unit(n)
    base = message * int(gmpy2.powmod_sec(factor, public.e, n)) % n
    signature = _power(private, base) * int(gmpy2.invert(factor, n)) % n
    if not hmac.compare_digest(int(gmpy2.powmod(signature, public.e, n)).to_bytes(public.num_bytes, "big"), blinded):
        raise BlindSignatureError(
            "a signature came out wrong and was kept back; the machine's memory or processor may be faulty"
        )
    return signature.to_bytes(public.num_bytes, "big")


def finalize(public: RsaPublicKey, blind_signature: bytes, blinding: Blinding, *, salt_bytes: int = SALT_BYTES) -> bytes:
    """Returns the unblinded signature of the message (RFC 9474, section 4.4).

    Raises:
        BlindSignatureError: the signer did not sign the blinded message.
    """
    if len(blind_signature) != public.num_bytes:
        raise BlindSignatureError("the blind signature has another length than the key's signatures")
    signature = (int.from_bytes(blind_signature, "big") * blinding.inverse % public.n).to_bytes(public.num_bytes, "big")
    if not public.verify(blinding.message, signature, salt_bytes=salt_bytes):
        raise BlindSignatureError("the signer's answer is no signature of the blinded message")
    return signature


def encode(message: bytes, num_bits: int, salt: bytes) -> bytes:
    """EMSA-PSS with SHA-384 and MGF1-SHA-384 (RFC 8017, section 9.1.1), with a given salt.

    `cryptography` has no separate encoding, and chooses its own salt.

    Raises:
        BlindSignatureError: the key is too small.
    """
    length = (num_bits + 7) // 8
    if length < _HASH_BYTES + len(salt) + 2:
        raise BlindSignatureError("the key is too small for SHA-384 and this salt")
    digest = hashlib.sha384(bytes(8) + hashlib.sha384(message).digest() + salt).digest()
    block = bytes(length - len(salt) - _HASH_BYTES - 2) + b"\x01" + salt
    masked = bytearray(a ^ b for a, b in zip(block, _mask(digest, len(block)), strict=True))
    masked[0] &= 0xFF >> (8 * length - num_bits)
    return bytes(masked) + digest + b"\xbc"


def _mask(seed: bytes, length: int) -> bytes:
    """MGF1 (RFC 8017, appendix B.2.1)."""
    blocks = (hashlib.sha384(seed + i.to_bytes(4, "big")).digest() for i in range(-(-length // _HASH_BYTES)))
    return b"".join(blocks)[:length]


def _power(private: RsaPrivateKey, base: int) -> int:
    """base to the private exponent, through both primes (RFC 8017, section 5.1.2)."""
    p, q = private.p, private.q
    in_p = gmpy2.powmod_sec(base % p, gmpy2.invert(private.e, p - 1), p)
    in_q = gmpy2.powmod_sec(base % q, gmpy2.invert(private.e, q - 1), q)
    return int(in_q + q * ((in_p - in_q) * gmpy2.invert(q, p) % p))


def _draw_unit(n: int) -> int:
    """Draws uniformly from the invertible numbers modulo n."""
    num_bytes = (n.bit_length() + 7) // 8
    while True:
        drawn = int.from_bytes(os.urandom(num_bytes), "big") >> (8 * num_bytes - n.bit_length())
        if 0 < drawn < n and gmpy2.gcd(drawn, n) == 1:
            return drawn


# Public keys of token type 2 as bytes: SubjectPublicKeyInfo under id-RSASSA-PSS with SHA-384 (RFC 9578, section 6.5).
#
# Pure. `cryptography` encodes RSA keys only as rsaEncryption, but the key's id is the hash of this encoding.


KEY_BITS = 2048
"""Token type 2 has signatures of 256 bytes."""

_SHA384 = bytes.fromhex("300b0609608648016503040202")
_MGF1_SHA384 = bytes.fromhex("301806092a864886f70d010108") + _SHA384
_PSS_ALGORITHM = (
    bytes.fromhex("303d06092a864886f70d01010a3030a00d") + _SHA384 + b"\xa1\x1a" + _MGF1_SHA384 + b"\xa2\x03\x02\x01\x30"
)
_BEHIND_ALGORITHM = b"\x03\x82\x01\x0f\x00"


def encode_public(key: RsaPublicKey) -> bytes:
    """Returns the key as the protocol's `pkI`, 342 bytes.

    Raises:
        ValueError: it does not have 2048 bits.
    """
    _check(key)
    numbers = rsa.RSAPublicNumbers(key.e, key.n).public_key().public_bytes(Encoding.DER, PublicFormat.PKCS1)
    info = _PSS_ALGORITHM + _BEHIND_ALGORITHM + numbers
    return b"\x30\x82" + len(info).to_bytes(2, "big") + info


def decode_public(data: bytes) -> RsaPublicKey:
    """Reads a key; accepts only the output of `encode_public`, so that a key has a single id.

    Raises:
        ValueError: it is anything else.
    """
    try:
        loaded = load_der_public_key(data)
    except Exception:  # any parser error about untrusted bytes
        raise ValueError("a token key is a SubjectPublicKeyInfo in DER, as RFC 9578 section 6.5 has it") from None
    if not isinstance(loaded, rsa.RSAPublicKey):
        raise ValueError("a token key of type 2 is an RSA key")
    numbers = loaded.public_numbers()
    key = RsaPublicKey(numbers.n, numbers.e)
    _check(key)
    if encode_public(key) != data:
        raise ValueError("a token key names id-RSASSA-PSS with SHA-384, MGF1 with SHA-384 and a salt of 48 bytes")
    return key


def key_id(encoded: bytes) -> bytes:
    """Returns `token_key_id`, SHA-256 of the encoded key (32 bytes)."""
    return hashlib.sha256(encoded).digest()


def _check(key: RsaPublicKey) -> None:
    if key.num_bits != KEY_BITS or key.e != 65537:
        raise ValueError("a token key of type 2 has 2048 bits and the exponent 65537")
