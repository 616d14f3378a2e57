"""The file that a client keeps: a signed statement about one answer, and what shows whose signature it is. Pure.

Everything in it but the salt is public. Who leaves the salt out shows the receipt without showing what it is about.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cloister.privacy.attestation.evidence import MAX_EVIDENCE_BYTES
from cloister.privacy.receipts.claims import MAX_JWS_BYTES, ReceiptError
from cloister.privacy.receipts.transcript import SALT_BYTES
from cloister.privacy.transparency.bundle import MAX_BUNDLE_BYTES

MAX_RECEIPT_BYTES: Final = 2 * (MAX_EVIDENCE_BYTES + MAX_BUNDLE_BYTES)
"""With room for base64."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of one answer.

    Attributes:
        jws: what the node signed, a JSON Web Signature in compact form.
        salt: opens the digests of request and answer, 32 bytes; empty hides what they are about.
        evidence: the node's evidence document, which binds the key of the signature.
        bundle: the epoch bundle that the client believed, with proofs and witnesses' signatures.
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
        ReceiptError: it is no receipt; the message never repeats the bytes.
    """
    if len(content) > MAX_RECEIPT_BYTES:
        raise ReceiptError(f"the file has {len(content):,} bytes; a receipt has {MAX_RECEIPT_BYTES:,} at most")
    try:
        return msgspec.json.decode(content, type=Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)  # positions and types only, never content
    raise ReceiptError(f"the file is no receipt ({why})")
