"""Refusals of the sealed programs as problem details (RFC 9457). They reveal nothing of the request except the error."""

from __future__ import annotations

from typing import Final

import msgspec

from cloister.trust.sealing import Fields, UnsealError
from cloister.types.errors import CloisterError

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
DATE_TYPE: Final = "https://iana.org/assignments/http-problem-types#date"
KEY_TYPE: Final = "https://iana.org/assignments/http-problem-types#ohttp-key"
RETRY_S: Final = 2


class ProblemError(CloisterError):
    """A refusal.

    Args:
        status: of the reply.
        title: one or two sentences: the error and what to do.
        kind: URI of a registered problem type, or `about:blank`.
        fields: header fields in addition to the content type.
        in_clear: whether the error concerns the sealed message itself; such a refusal is never sealed, even if the message
            opened partly.
    """

    def __init__(
        self, status: int, title: str, *, kind: str = "about:blank", fields: Fields = (), in_clear: bool = False
    ) -> None:
        super().__init__(title)
        self.status = status
        self.kind = kind
        self.fields = fields
        self.in_clear = in_clear

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"type": self.kind, "title": self.message, "status": self.status})

    @property
    def headers(self) -> Fields:
        """Every header field except the content length."""
        retry = ((b"retry-after", b"%d" % RETRY_S),) if self.status == 503 else ()
        return ((b"content-type", PROBLEM_MEDIA_TYPE.encode()), (b"cache-control", b"no-store"), *retry, *self.fields)


def problem_of(error: CloisterError) -> ProblemError:
    """Converts an error to a refusal. For an `UnsealError` it omits the cause (RFC 9458, section 5.3)."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, UnsealError):
        return ProblemError(error.status, error.message, kind=KEY_TYPE, in_clear=True)
    return ProblemError(error.status, error.message)
