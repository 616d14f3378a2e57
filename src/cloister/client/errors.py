"""Why the sealed client did not send, or got no answer. None is an `httpx` error: SDKs repeat those, and that draws again."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.types.errors import CloisterError


class SealedError(CloisterError):
    """Base of what the sealed client refuses or fails at."""

    code = "sealed_request_failed"
    status = 502


class RelayUnreachableError(SealedError):
    """The relay, or the issuer, cannot be reached; nothing was sent."""

    code = "relay_unreachable"


class EpochRefusedError(SealedError):
    """The list of nodes is not one that everybody was shown, or it does not hold now. Nothing was sent.

    Attributes:
        reason: the slug of what was wrong (`transparency.Reason`), None where there was no list at all.
    """

    code = "epoch_refused"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class EvidenceRefusedError(SealedError):
    """No node that was drawn proved what the policy asks for. Nothing was sent.

    Attributes:
        steps: the slugs of the steps that failed.
    """

    code = "evidence_refused"

    def __init__(self, message: str, steps: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.steps = tuple(steps)


class NoTokensError(SealedError):
    """There is no token to pay with, and the issuer gives none."""

    code = "no_tokens"
    status = 429


class IssuerContradictionError(NoTokensError):
    """The issuer signed two statements that cannot both be: so it could tell tokens by their key, and none is bought or spent.

    Attributes:
        proof: both statements as JSON, for anybody to check (`cloister verify issuer`).
    """

    code = "issuer_contradicts_itself"
    status = 502

    def __init__(self, message: str, proof: bytes) -> None:
        super().__init__(message)
        self.proof = proof


class NoAnswerError(SealedError):
    """Every draw failed before an answer began, or one that was sent did and no other could be made.

    Attributes:
        draws: the nodes that were drawn, by node_id, in order.
    """

    code = "no_answer"

    def __init__(self, message: str, draws: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.draws = tuple(draws)


class RepeatedRequestError(SealedError):
    """A program repeats a request by itself; each repetition would be further draws, beyond the bound that is promised."""

    code = "repeated_request"
    status = 409

    def __init__(self) -> None:
        super().__init__(
            "This request was sent before and its answer did not come or broke off; the program repeats it by itself, and each "
            "repetition would draw nodes again. Set max_retries=0 to see the first failure, or ask anew."
        )


class FailedTryError(Exception):
    """One draw brought no answer; another may. Its text is free of what a user sent."""


class FinalRefusalError(SealedError):
    """The gateway or the relay refused in a way that another draw would not change."""

    code = "request_refused"
