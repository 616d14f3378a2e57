"""How a client asks for a receipt, and how the node hands it over. Pure: no I/O, no clock.

A field in the sealed request names epoch and evidence; a trailer field of the sealed answer has the signature. Where no receipt
is asked for, zeros stand in the place of both, so lengths do not tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cloister.privacy.receipts.claims import SIGNATURE_BYTES, ReceiptError, decode64, encode64
from cloister.privacy.sealing import Fields, HttpRequest, MessageError, RequestHead, encode_request, find_field

FIELD: Final = b"cloister-receipt"
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client relied on when it drew the node; see `Claims`. Both are SHA-256 in hex."""

    epoch: str
    evidence: str

    @property
    def value(self) -> bytes:
        """The value of the request's field."""
        return encode64(bytes.fromhex(self.epoch) + bytes.fromhex(self.evidence))


NO_WISH: Final = Wish("00" * _DIGEST_BYTES, "00" * _DIGEST_BYTES)


def with_wish(request: HttpRequest, wish: Wish | None) -> tuple[HttpRequest, int]:
    """Returns the request with its wish, if any, and how many bytes it takes with one: both kinds are padded from there."""
    head = request.head
    asking = RequestHead(head.method, head.scheme, head.authority, head.path, (*head.fields, (FIELD, (wish or NO_WISH).value)))
    with_field = len(encode_request(HttpRequest(asking, b"-"))) - len(encode_request(HttpRequest(head, b"-")))
    room = len(encode_request(HttpRequest(head, request.content))) + with_field
    return HttpRequest(asking if wish else head, request.content), room


def read_wish(fields: Fields) -> Wish | None:
    """Returns the wish in a request's fields; None where there is none.

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
    """A request whose wish for a receipt cannot be read."""

    code = "malformed_receipt_field"
    status = 400


def read_signature(trailers: Fields) -> bytes | None:
    """Returns the signature in an answer's trailers; None where there is none that could be one."""
    try:
        value = find_field(trailers, FIELD)
        signature = decode64((value or "").encode("ascii"))
    except (MessageError, ValueError):
        return None
    return signature if len(signature) == SIGNATURE_BYTES else None
