"""Sealed token requests through a relay: the issuer learns the account, but not the client's address.

Every reply to an opened request, refusals included, is sealed at one length and sent after a fixed time. Otherwise the
relay could distinguish a refusal (a millisecond) from a batch of signatures by its latency.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from cloister.private.http_io import REPLAY_WINDOW_S, check_date
from cloister.private.problems import ProblemError, problem_of
from cloister.private.unsealing import LocalUnsealer
from cloister.server.errors import error_body
from cloister.trust.sealing import (
    GATEWAY_KEY_LIFE_S,
    GATEWAY_KEY_OVERLAP_S,
    KEMS,
    WHOLE,
    Fields,
    Header,
    KeyRing,
    OhttpContext,
    Receiver,
    ReplayCache,
    decode_request,
    find_field,
    header_bytes,
)
from cloister.trust.tokens.purchase import (
    PURCHASE_BYTES,
    REQUEST_PATH,
    REQUEST_TYPE,
    RESPONSE_TYPE,
    seal_purchase_answer,
)
from cloister.types.errors import CloisterError, ConfigError, InvalidRequestError

MAX_SEALED_BYTES: Final = PURCHASE_BYTES + max(kem.enc_bytes for kem in KEMS) + 64
"""Larger than any valid request, with header and tag."""
ANSWER_STEP_S: Final = 0.25
"""Replies are sent this long after their request was opened, or a whole multiple of it. 20 signatures take a tenth of it."""

Issue = Callable[[str, str, bytes], Awaitable[tuple[str, bytes]]]
"""Maps media type, `Authorization` value and body of a token request to media type and body of the response."""


class SealedPurchases:
    """Answers `message/ohttp-req` (RFC 9458). Its keys live for a day, in memory only.

    Args:
        issue: handles the opened request; raises `CloisterError`.
        read: reads a request's body up to the given number of bytes, with a timeout.
        now: Unix seconds.
    """

    def __init__(
        self, issue: Issue, read: Callable[[Request, int], Awaitable[bytes]], now: Callable[[], float] = time.time
    ) -> None:
        self._issue = issue
        self._read = read
        self._now = now
        ring = KeyRing(time.monotonic(), life_s=GATEWAY_KEY_LIFE_S, overlap_s=GATEWAY_KEY_OVERLAP_S)
        self.unsealer = LocalUnsealer(Receiver(ring, ReplayCache(REPLAY_WINDOW_S)))

    async def answer(self, request: Request) -> Response:
        try:
            if request.headers.get("content-type", "") != REQUEST_TYPE:
                raise ProblemError(415, f"Send a sealed token request, as {REQUEST_TYPE}.")
            exchange, message = await self._open(await self._read(request, MAX_SEALED_BYTES))
        except CloisterError as error:
            problem = problem_of(error)
            fields = {name.decode(): value.decode() for name, value in problem.headers}
            return Response(problem.body, problem.status, fields)
        opened_s = time.monotonic()
        status, media_type, content = await self._answer(message)
        sealed = seal_purchase_answer(exchange, status, media_type, content)
        await asyncio.sleep(wait_s(time.monotonic() - opened_s))
        return Response(sealed, media_type=RESPONSE_TYPE, headers={"cache-control": "no-store"})

    async def _open(self, sealed: bytes) -> tuple[OhttpContext, bytes]:
        header = Header.parse(sealed)
        exchange = await self.unsealer.begin(header, WHOLE)
        message = exchange.context.open(sealed[header_bytes(sealed) :])
        await self.unsealer.accept(header)
        return exchange, message

    def _check_date(self, fields: Fields) -> None:
        try:
            check_date(fields, self._now(), is_needed=True)
        except ProblemError:
            message = "the purchase is dated more than five minutes from the issuer's clock; set this machine's clock"
            raise InvalidRequestError(message) from None

    async def _answer(self, message: bytes) -> tuple[int, str, bytes]:
        try:
            asked = decode_request(message)
            self._check_date(asked.head.fields)
            if asked.head.method != "POST" or not asked.head.path.endswith(REQUEST_PATH):
                raise ProblemError(404, f"Sealed requests are POST to {REQUEST_PATH}.")
            kind, authorization = (find_field(asked.head.fields, name) or "" for name in (b"content-type", b"authorization"))
            media_type, content = await self._issue(kind, authorization, asked.content)
            return 200, media_type, content
        except ConfigError:
            raise  # the text names local files, for the operator only
        except CloisterError as error:
            return error.status, "application/json", error_body(error)


def wait_s(elapsed_s: float) -> float:
    """Returns the delay in seconds before a reply is sent, given the time since its request was opened."""
    return max(1, math.ceil(elapsed_s / ANSWER_STEP_S)) * ANSWER_STEP_S - elapsed_s
