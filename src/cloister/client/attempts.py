"""The attempts of one request, and conversions of httpx messages; shared by both transports."""

from __future__ import annotations

from typing import NoReturn

import httpx

from cloister.client.envelope import Answer, read_message
from cloister.client.errors import (
    EvidenceRefusedError,
    FailedTryError,
    FinalRefusalError,
    NoAnswerError,
    RepeatedRequestError,
    SealedError,
)
from cloister.client.protocol import DEADLINE_S
from cloister.client.session import PreparedRequest
from cloister.trust.attestation import Outcome
from cloister.trust.sealing import CHUNKED, Fields

ANSWER_DEADLINE_S = 600.0
"""Default read timeout of an answer."""
RETRY_COUNT = "x-stainless-retry-count"
"""Header in which the SDKs of OpenAI and Anthropic mark a retried request."""
SHOULD_RETRY = b"x-should-retry"
"""Header that tells those SDKs whether to retry: each retry would be further draws."""
DRAWN = "cloister_drawn"
"""Request extension with the nodes that were drawn for it (`Attempts.drawn`)."""
CUT_OFF = "what was received of it may be used, but it is not whole"
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})


class Attempts:
    """The draws of one request, with the reasons of failures.

    Args:
        request: receives the list of drawn nodes (`extensions["cloister_drawn"]`), also if there is no answer.

    Attributes:
        drawn: node_ids, in order; for a member without a node in the epoch its name.
        num_sent: number of draws for which a request was sent.
    """

    def __init__(self, request: httpx.Request) -> None:
        self.drawn: list[str] = []
        self.num_sent = 0
        request.extensions[DRAWN] = self.drawn
        self._failures: list[str] = []
        self._refused: list[list[str]] = []

    def __len__(self) -> int:
        return len(self.drawn)

    @staticmethod
    def check_first(request: httpx.Request) -> None:
        """Refuses a request that an SDK retries by itself.

        Raises:
            RepeatedRequestError: it is a retry.
        """
        if request.headers.get(RETRY_COUNT, "0") != "0":
            raise RepeatedRequestError

    def draw(self, ready: PreparedRequest) -> None:
        """Counts a draw.

        Raises:
            FailedTryError: the node's evidence is refused, or the epoch has no such node; nothing is sent to it.
        """
        self.drawn.append(ready.member.name if ready.node is None else ready.node.node_id)
        failed = ready.findings.of(Outcome.FAILED)
        if failed:
            self._refused.append([step.slug for step in failed])
            steps = "; ".join(f"{step.slug}: {step.text}" for step in failed)
            raise FailedTryError(f"the node of {ready.member.name} is refused: {steps}")

    def fail(self, error: FailedTryError) -> None:
        """Records why the last draw failed."""
        self._failures.append(str(error))

    def conclude(self, error: SealedError) -> SealedError:
        """Converts an error that ends the request: a request may already have been sent for an earlier draw.

        Otherwise an attacker who withholds an answer and then the epoch could make a program retry without knowing of a draw.
        """
        if not self.num_sent or isinstance(error, FinalRefusalError):
            return error
        reasons = "; ".join(dict.fromkeys(self._failures))
        return NoAnswerError(
            f"No answer began after {len(self)} draws ({reasons}), and there was no further one ({error.code}).", self.drawn
        )

    def give_up(self) -> SealedError:
        """Returns the error for a request whose every draw failed."""
        reasons = "; ".join(dict.fromkeys(self._failures))
        if len(self._refused) == len(self):
            steps = sorted({slug for slugs in self._refused for slug in slugs})
            return EvidenceRefusedError(f"Nothing was sent: {reasons}.", steps)
        return NoAnswerError(f"No answer began after {len(self)} draws ({reasons}). Try again in a moment.", self.drawn)


def is_answer(reply: httpx.Response) -> bool:
    """Returns whether a response came from the gateway, through the relay."""
    return reply.status_code == 200 and reply.headers.get("content-type", "") == CHUNKED.response_type


def refuse_reply(status: int, body: bytes) -> NoReturn:
    """Raises the error for a response that is not the gateway's.

    Raises:
        FinalRefusalError: the relay refused the request itself.
        FailedTryError: anything else; another draw may succeed.
    """
    message = read_message(body) or "it gave no reason"
    if status in (413, 414, 431):
        raise FinalRefusalError(f"The relay refused the request ({status}): {message}")
    raise FailedTryError(f"the relay answered {status}: {message}")


def to_fields(request: httpx.Request) -> Fields:
    """Returns a request's header fields."""
    return tuple((name.lower(), value) for name, value in request.headers.raw)


def to_request(
    url: str, body: bytes, timeouts: dict[str, float] | None, method: str = "POST", headers: dict[str, str] | None = None
) -> httpx.Request:
    """Returns a request to the relay or the issuer, with only the necessary headers."""
    fields = {"content-type": CHUNKED.request_type} if headers is None else headers
    given = timeouts or dict.fromkeys(("connect", "read", "write", "pool"), DEADLINE_S)
    return httpx.Request(method, url, headers=fields, content=body if method == "POST" else None, extensions={"timeout": given})


def read_timeouts(request: httpx.Request) -> dict[str, float]:
    """Returns the program's timeouts, with our defaults for unset ones: every wait is bounded."""
    given = request.extensions.get("timeout") or {}
    limits = {"connect": DEADLINE_S, "read": ANSWER_DEADLINE_S, "write": DEADLINE_S, "pool": DEADLINE_S}
    return {name: limit if given.get(name) is None else float(given[name]) for name, limit in limits.items()}


def to_response(
    answer: Answer, stream: httpx.SyncByteStream | httpx.AsyncByteStream, ready: PreparedRequest, attempts: Attempts
) -> httpx.Response:
    """Returns the node's response. `extensions["cloister"]` names the epoch and the nodes that were drawn; the last answers.

    If receipts are requested, its `receipt` is this answer's (`ReceiptReader.receipt`) once all of it was read.
    """
    assert answer.head is not None, "the head was read"
    fields = [(name, value) for name, value in answer.head.fields if name not in HOP_BY_HOP]
    if answer.head.status >= 400:
        fields.append((SHOULD_RETRY, b"false"))
    about = {"epoch": ready.epoch.epoch, "drawn": tuple(attempts.drawn), "receipt": answer.receipt}
    return httpx.Response(answer.head.status, headers=fields, stream=stream, extensions={"cloister": about})
