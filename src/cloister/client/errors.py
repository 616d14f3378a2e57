"""Errors of the sealed client. None is an `httpx` error: SDKs retry those, which would draw again."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.types.errors import CloisterError


class SealedError(CloisterError):
    """Base of the sealed client's errors."""

    code = "sealed_request_failed"
    status = 502


class RelayUnreachableError(SealedError):
    """The relay, or the issuer, cannot be reached; nothing was sent."""

    code = "relay_unreachable"


class EpochRefusedError(SealedError):
    """The epoch is not proved to be public, or is not valid now. Nothing was sent.

    Attributes:
        reason: slug of the error (`transparency.Reason`); None if there was no epoch at all.
    """

    code = "epoch_refused"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class EvidenceRefusedError(SealedError):
    """No drawn node satisfied the policy. Nothing was sent.

    Attributes:
        steps: the slugs of the steps that failed.
    """

    code = "evidence_refused"

    def __init__(self, message: str, steps: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.steps = tuple(steps)


class ImagesRefusedError(SealedError):
    """The request has images, and nothing would cover them. Nothing was sent."""

    code = "images_refused"
    status = 400


class NoTokensError(SealedError):
    """No token is left, and the issuer sells none."""

    code = "no_tokens"
    status = 429


class IssuerContradictionError(NoTokensError):
    """The issuer signed two contradictory statements, so it could distinguish tokens by key. No token is bought or spent.

    Attributes:
        proof: both statements as JSON, which anyone can check (`cloister verify issuer`).
    """

    code = "issuer_contradicts_itself"
    status = 502

    def __init__(self, message: str, proof: bytes) -> None:
        super().__init__(message)
        self.proof = proof


class NoAnswerError(SealedError):
    """Every draw failed before an answer began, or a sent request failed and no further draw was possible.

    Attributes:
        draws: the nodes that were drawn, by node_id, in order.
    """

    code = "no_answer"

    def __init__(self, message: str, draws: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.draws = tuple(draws)


class RepeatedRequestError(SealedError):
    """A program retries a request by itself; each retry would be further draws, beyond the guaranteed limit."""

    code = "repeated_request"
    status = 409

    def __init__(self) -> None:
        super().__init__(
            "This request was sent before and its answer did not come or broke off; the program repeats it by itself, and each "
            "repetition would draw nodes again. Set max_retries=0 to see the first failure, or ask anew."
        )


class FailedTryError(Exception):
    """One draw got no answer; another may. Its text contains no user content."""


class FinalRefusalError(SealedError):
    """The gateway or the relay refused in a way that another draw would not change."""

    code = "request_refused"
