"""Public keys of token type 2 as bytes: SubjectPublicKeyInfo under id-RSASSA-PSS with SHA-384 (RFC 9578, section 6.5).

Pure. `cryptography` writes RSA keys under rsaEncryption only, and the key's identity is the hash of these very bytes.
"""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from cloister.privacy.tokens.blind_rsa import RsaPublicKey

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
    """Reads a key; takes exactly what `encode_public` writes, so that one key has one identity.

    Raises:
        ValueError: it is anything else.
    """
    try:
        loaded = load_der_public_key(data)
    except Exception:  # whatever the parser says of bytes that it was given
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
