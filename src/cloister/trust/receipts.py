"""Receipts: a node's signed statement about one answer, and its later verification. Pure: no I/O, no clock.

Contains the signed claims, the digests that both sides compute of an exchange, the client's request for a receipt, and the
receipt file.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from cloister.trust.attestation.evidence import MAX_EVIDENCE_BYTES
from cloister.trust.sealing import Fields, HttpRequest, MessageError, OhttpContext, RequestHead, encode_request, find_field
from cloister.trust.transparency.epoch import MAX_BUNDLE_BYTES
from cloister.types.errors import CloisterError

# A receipt's claims as a JSON Web Signature in compact form (RFC 7515, Ed25519 by RFC 8037).
#
# The client knows every claim in advance, so only the signature is transmitted; the client adds the rest.


SIGNATURE_BYTES: Final = 64
KEY_BYTES: Final = 32
MAX_JWS_BYTES: Final = 4096
HEADER: Final = b'{"alg":"EdDSA","typ":"cloister-receipt+jws"}'
"""The only protected header that is written and accepted: a receipt cannot choose how it is verified."""

Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
Status = Annotated[int, Meta(ge=200, le=599)]


class ReceiptError(CloisterError):
    """A receipt that cannot be read, or that the attested key did not sign. Its text contains nothing of request or answer."""

    code = "broken_receipt"
    status = 502


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The claims that a node signs about one answer. Digests are SHA-256 in hex.

    Attributes:
        epoch: leaf hash (RFC 9162, section 2.1.1) of the epoch from which the client drew the node.
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
    """Parses a compact serialisation of `Claims.to_jws`; returns the claims and the unverified signature.

    Raises:
        ReceiptError: it is another type of object, or not in its canonical form.
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
    """Returns whether `key` (Ed25519, 32 bytes) signed the claims."""
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
    """Decodes the output of `encode64`, and no other form.

    Raises:
        ValueError: it is in another form.
    """
    decoded = urlsafe_b64decode(data + b"=" * (-len(data) % 4))
    if encode64(decoded) != data:
        raise ValueError("not base64url in its one form")
    return decoded


# Salted digests of one exchange, computed while it streams, on both sides.


SALT_BYTES: Final = 32
_SALT_LABEL: Final = b"cloister receipt v1 salt"


def derive_salt(exchange: OhttpContext) -> bytes:
    """Returns the salt of an exchange, 32 bytes from the exporter of its HPKE context (RFC 9180, section 5.3).

    Only the two ends of the exchange know it, and it is unique: so a receipt reveals nothing about the texts without the salt,
    and equal texts have different receipts.
    """
    return exchange.context.export(_SALT_LABEL, SALT_BYTES)


def digest_request(salt: bytes, method: str, target: str, content: bytes) -> str:
    """Returns SHA-256(salt || method || " " || target || LF || content) in hex; `target` is path and query."""
    return digest_pieces(salt, (f"{method} {target}\n".encode(), content))


def digest_pieces(salt: bytes, pieces: Iterable[bytes]) -> str:
    """Returns SHA-256(salt || pieces) in hex."""
    digest = hashlib.sha256(salt)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Transcript:
    """The digests of a request and its answer, computed while the answer is written or read."""

    def __init__(self, exchange: OhttpContext, request: HttpRequest) -> None:
        self.salt = derive_salt(exchange)
        self._request = digest_request(self.salt, request.head.method, request.head.path, request.content)
        self._answer = hashlib.sha256(self.salt)

    def add(self, content: bytes) -> None:
        """Adds the next piece of the answer's content."""
        self._answer.update(content)

    def claim(self, status: int, *, epoch: str, evidence: str, profile: str) -> Claims:
        """Returns the claims about the complete answer."""
        return Claims(
            epoch=epoch,
            evidence=evidence,
            profile=profile,
            request=self._request,
            status=status,
            answer=self._answer.hexdigest(),
        )


# The receipt file: a signed statement about one answer, and the evidence for the signing key.
#
# Everything in it but the salt is public. Without the salt, a receipt does not reveal the exchange that it covers.


MAX_RECEIPT_BYTES: Final = 2 * (MAX_EVIDENCE_BYTES + MAX_BUNDLE_BYTES)
"""Including base64 overhead."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The receipt of one answer.

    Attributes:
        jws: the signed claims, a JSON Web Signature in compact form.
        salt: salt of the digests of request and answer, 32 bytes; empty hides the exchange.
        evidence: the node's evidence document, which binds the key of the signature.
        bundle: the epoch bundle that the client verified, with proofs and witnesses' signatures.
    """

    type: Annotated[str, Meta(pattern=r"^cloister receipt v1\Z")] = "cloister receipt v1"
    jws: Annotated[str, Meta(max_length=MAX_JWS_BYTES)]
    salt: Annotated[bytes, Meta(max_length=SALT_BYTES)] = b""
    evidence: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)]
    bundle: Annotated[bytes, Meta(max_length=MAX_BUNDLE_BYTES)]

    def encode(self) -> bytes:
        """Returns the file's content, JSON with byte strings in base64."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted")) + b"\n"


def read_receipt(content: bytes) -> Receipt:
    """Reads the file's content.

    Raises:
        ReceiptError: it is not a receipt; the message never repeats the bytes.
    """
    if len(content) > MAX_RECEIPT_BYTES:
        raise ReceiptError(f"the file has {len(content):,} bytes; a receipt has {MAX_RECEIPT_BYTES:,} at most")
    try:
        return msgspec.json.decode(content, type=Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)  # positions and types only, never content
    raise ReceiptError(f"the file is no receipt ({why})")


# How a client requests a receipt, and how the node returns it.
#
# A field in the sealed request names epoch and evidence; a trailer field of the sealed answer has the signature. Without a
# receipt, zeros replace both, so lengths reveal nothing.


FIELD: Final = b"cloister-receipt"
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Wish:
    """The epoch and evidence that a client relied on; see `Claims`. Both are SHA-256 in hex."""

    epoch: str
    evidence: str

    @property
    def value(self) -> bytes:
        """The value of the request's field."""
        return encode64(bytes.fromhex(self.epoch) + bytes.fromhex(self.evidence))


NO_WISH: Final = Wish("00" * _DIGEST_BYTES, "00" * _DIGEST_BYTES)


def with_wish(request: HttpRequest, wish: Wish | None) -> tuple[HttpRequest, int]:
    """Returns the request with the receipt field, if wanted, and its length with that field: both kinds are padded
    from there."""
    head = request.head
    asking = RequestHead(head.method, head.scheme, head.authority, head.path, (*head.fields, (FIELD, (wish or NO_WISH).value)))
    with_field = len(encode_request(HttpRequest(asking, b"-"))) - len(encode_request(HttpRequest(head, b"-")))
    room = len(encode_request(HttpRequest(head, request.content))) + with_field
    return HttpRequest(asking if wish else head, request.content), room


def read_wish(fields: Fields) -> Wish | None:
    """Returns the receipt request in a request's fields; None if there is none.

    Raises:
        ReceiptError: it is malformed.
    """
    try:
        value = find_field(fields, FIELD)
        if value is None:
            return None
        digests = decode64(value.encode("ascii"))
    except (MessageError, ValueError):
        digests = b""
    if len(digests) != 2 * _DIGEST_BYTES:
        raise MalformedWishError(
            f"the field {FIELD.decode()} has the digests of epoch and evidence, 64 bytes in base64url; leave it out if unsure"
        )
    return Wish(digests[:_DIGEST_BYTES].hex(), digests[_DIGEST_BYTES:].hex())


class MalformedWishError(ReceiptError):
    """A request with a malformed receipt field."""

    code = "malformed_receipt_field"
    status = 400


def read_signature(trailers: Fields) -> bytes | None:
    """Returns the signature in an answer's trailers; None if there is no well-formed one."""
    try:
        value = find_field(trailers, FIELD)
        signature = decode64((value or "").encode("ascii"))
    except (MessageError, ValueError):
        return None
    return signature if len(signature) == SIGNATURE_BYTES else None
