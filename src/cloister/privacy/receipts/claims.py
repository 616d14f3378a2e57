"""What a receipt says, as a JSON Web Signature in compact form (RFC 7515, Ed25519 by RFC 8037). Pure: no I/O, no clock.

The client knows every claim before the node has signed, so the signature alone travels; the client puts the rest around it.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from cloister.types.errors import CloisterError

SIGNATURE_BYTES: Final = 64
KEY_BYTES: Final = 32
MAX_JWS_BYTES: Final = 4096
HEADER: Final = b'{"alg":"EdDSA","typ":"cloister-receipt+jws"}'
"""The one protected header that is written and taken: nothing in a receipt chooses how it is checked."""

Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
Status = Annotated[int, Meta(ge=200, le=599)]


class ReceiptError(CloisterError):
    """A receipt that cannot be read, or that the attested key did not sign. Its text has nothing of request or answer."""

    code = "broken_receipt"
    status = 502


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node signs about one answer. Digests are SHA-256 in hex.

    Attributes:
        epoch: leaf hash (RFC 9162, section 2.1.1) of the epoch that the client drew the node from.
        evidence: digest of the node's evidence document: code, model, configuration, profile, hardening, keys.
        profile: name of the privacy profile that the node was started with.
        request: salted digest of method, target and content (`Transcript`).
        status: HTTP status of the answer.
        answer: salted digest of its whole content.
    """

    epoch: Hex
    evidence: Hex
    profile: Name
    request: Hex
    status: Status
    answer: Hex

    @property
    def signing_input(self) -> bytes:
        """The bytes that are signed (RFC 7515, section 5.1): header and canonical JSON, each in base64url."""
        return encode64(HEADER) + b"." + encode64(msgspec.json.encode(self, order="sorted"))

    def to_jws(self, signature: bytes) -> str:
        """Returns the compact serialisation with its signature."""
        return (self.signing_input + b"." + encode64(signature)).decode()


def read_jws(jws: str) -> tuple[Claims, bytes]:
    """Reads a compact serialisation as `Claims.to_jws` writes it; returns the claims and the signature, not yet checked.

    Raises:
        ReceiptError: it is another kind of object, or not in its one form.
    """
    try:
        _, payload, signature = (decode64(part) for part in jws.encode("ascii")[: MAX_JWS_BYTES + 1].split(b"."))
        claims = msgspec.json.decode(payload, type=Claims)
    except (ValueError, msgspec.DecodeError):
        raise ReceiptError("the receipt is no JSON Web Signature of a node; was it cut or edited?") from None
    if len(signature) != SIGNATURE_BYTES or claims.to_jws(signature) != jws:
        raise ReceiptError("the receipt is not in the one form that nodes sign")
    return claims, signature


def is_signed(claims: Claims, signature: bytes, key: bytes) -> bool:
    """Says whether `key` (Ed25519, 32 bytes) signed the claims."""
    if len(key) != KEY_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, claims.signing_input)
    except InvalidSignature:
        return False
    return True


def encode64(data: bytes) -> bytes:
    """Base64url without padding (RFC 7515, section 2)."""
    return urlsafe_b64encode(data).rstrip(b"=")


def decode64(data: bytes) -> bytes:
    """Reads what `encode64` writes, and nothing else.

    Raises:
        ValueError: it is not in that form.
    """
    decoded = urlsafe_b64decode(data + b"=" * (-len(data) % 4))
    if encode64(decoded) != data:
        raise ValueError("not base64url in its one form")
    return decoded
