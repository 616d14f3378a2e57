"""The reply to an opened request: binary HTTP, sealed in chunks, or as a whole if the request was; and its receipt."""

from __future__ import annotations

from typing import Final

from cloister.policy.policy import Policy, Use
from cloister.private.http_io import Outgoing
from cloister.private.problems import ProblemError
from cloister.private.unsealing import Unsealer
from cloister.trust.receipts import FIELD, NO_WISH, SIGNATURE_BYTES, Transcript, Wish, encode64, read_wish
from cloister.trust.sealing import (
    CHUNKED,
    BinaryHttpWriter,
    Fields,
    HttpRequest,
    HttpResponse,
    OhttpContext,
    ReplayCacheFullError,
    ResponseHead,
    ResponseSealer,
    UnsealError,
    encode_response,
    seal_response,
)
from cloister.types.errors import EngineError

MAX_WHOLE_BYTES: Final = 16 * 2**20
"""Longest response that is buffered to be sealed as a whole."""


class SealedReply:
    """Seals each piece passed to `emit` and sends it; the head of the outer reply is sent with the first piece.

    Attributes:
        writer: writes the inner binary HTTP response.
    """

    def __init__(self, exchange: OhttpContext, out: Outgoing) -> None:
        self._exchange = exchange
        self._out = out
        self._sealer = ResponseSealer(exchange) if exchange.form is CHUNKED else None
        self._whole = bytearray()
        self.writer = BinaryHttpWriter()

    async def emit(self, data: bytes, last: bool) -> None:
        """Seals one piece of plain text as one chunk (longer than 16 KiB: several) and sends it immediately.

        Raises:
            ProblemError: the response is too long to be sealed as a whole.
            GoneError: the client has disconnected.
        """
        if self._sealer is not None:
            sealed = self._sealer.finish(data) if last else self._sealer.seal(data)
            await self._begin(())
            await self._out.write(sealed, last=last)
            return
        self._whole += data
        if len(self._whole) > MAX_WHOLE_BYTES:
            raise ProblemError(502, f"The response is too long for {self._exchange.form.response_type}; ask in chunks.")
        if last:
            sealed = seal_response(self._exchange, bytes(self._whole))
            await self._begin(((b"content-length", b"%d" % len(sealed)),))
            await self._out.write(sealed, last=True)

    async def refuse(self, problem: ProblemError) -> None:
        """Seals a complete refusal and sends it."""
        head = ResponseHead(problem.status, problem.headers)
        self._whole.clear()
        await self.emit(encode_response(HttpResponse(head, problem.body)), True)

    async def _begin(self, fields: Fields) -> None:
        if self._out.has_begun:
            return
        form = self._exchange.form
        incremental = ((b"incremental", b"?1"),) if form is CHUNKED else ()
        kind = (b"content-type", form.response_type.encode())
        await self._out.begin(200, (kind, (b"cache-control", b"no-store"), *incremental, *fields))


class AnswerEnding:
    """Tracks one response for its receipt.

    Every response is hashed, signed and has space for a signature, whether or not a receipt was requested: neither lengths nor
    times reveal who wants receipts. Nothing outlives the request.

    Args:
        profile: privacy profile of this node; it is part of the receipt, and it may forbid receipts.

    Raises:
        MalformedWishError: the request's header field is malformed.
        PolicyError: a receipt is requested, but the profile forbids it.
    """

    def __init__(self, unsealer: Unsealer, exchange: OhttpContext, request: HttpRequest, profile: str) -> None:
        self._wish: Wish | None = read_wish(request.head.fields)
        Policy(profile).check({"receipt": Use(self._wish is not None, "the request")})
        self._unsealer = unsealer
        self._exchange = exchange
        self._profile = profile
        self._transcript = Transcript(exchange, request)

    def add(self, content: bytes) -> bytes:
        """Hashes the next piece of content and returns it."""
        self._transcript.add(content)
        return content

    async def end(self, writer: BinaryHttpWriter, status: int) -> bytes:
        """Returns the end of the message: the signature if it was requested, else zeros as padding."""
        wish = self._wish or NO_WISH
        claims = self._transcript.claim(status, epoch=wish.epoch, evidence=wish.evidence, profile=self._profile)
        try:
            signature = await self._unsealer.sign(self._exchange.header, claims.signing_input)
        except (UnsealError, ReplayCacheFullError, EngineError):  # the key expired long before the response ended
            signature = b""
        end = writer.end(((FIELD, encode64(signature or bytes(SIGNATURE_BYTES))),))
        return end if self._wish and signature else bytes(len(end))
