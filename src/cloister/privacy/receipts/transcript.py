"""Salted digests of one exchange, taken while it passes; client and node keep one each. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from cloister.privacy.receipts.claims import Claims
from cloister.privacy.sealing import Exchange, HttpRequest

SALT_BYTES: Final = 32
_SALT_LABEL: Final = b"cloister receipt v1 salt"


def derive_salt(exchange: Exchange) -> bytes:
    """Returns the salt of an exchange, 32 bytes from the exporter of its HPKE context (RFC 9180, section 5.3).

    Only the two ends of the exchange know it, and no two exchanges share one: so a receipt tells nothing about the texts to who
    is not shown the salt, and equal texts have different receipts.
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
    """The digests of a request and of its answer as that is written or read."""

    def __init__(self, exchange: Exchange, request: HttpRequest) -> None:
        self.salt = derive_salt(exchange)
        self._request = digest_request(self.salt, request.head.method, request.head.path, request.content)
        self._answer = hashlib.sha256(self.salt)

    def add(self, content: bytes) -> None:
        """Takes the next piece of the answer's content."""
        self._answer.update(content)

    def claim(self, status: int, *, epoch: str, evidence: str, profile: str) -> Claims:
        """Returns the claims about the answer, which is complete."""
        return Claims(
            epoch=epoch,
            evidence=evidence,
            profile=profile,
            request=self._request,
            status=status,
            answer=self._answer.hexdigest(),
        )
