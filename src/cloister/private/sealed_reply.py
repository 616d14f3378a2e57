"""The reply to an opened request: binary HTTP, sealed piece by piece, or whole where it was asked in that form; and its end,
with or without a receipt."""

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
"""Longest response that is kept to be sealed whole."""


class SealedReply:
    """Seals what `emit` is given and sends it; the head of the outer reply goes with the first piece.

    Attributes:
        writer: for the binary HTTP response inside.
    """

    def __init__(self, exchange: OhttpContext, out: Outgoing) -> None:
        self._exchange = exchange
        self._out = out
        self._sealer = ResponseSealer(exchange) if exchange.form is CHUNKED else None
        self._whole = bytearray()
        self.writer = BinaryHttpWriter()

    async def emit(self, data: bytes, last: bool) -> None:
        """Seals one piece of plain text as one chunk (of at most 16 KiB; longer ones are cut) and sends it at once.

        Raises:
            ProblemError: the response is too long to be sealed whole.
            GoneError: nobody takes it.
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
        """Seals a whole refusal and sends it."""
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
    """Follows one answer.

    Every answer is hashed and signed and has room for a signature, whoever asked: neither lengths nor times tell who wants
    receipts. Nothing of it outlives the request.

    Args:
        profile: that this node runs under; it is signed, and it may refuse receipts.

    Raises:
        MalformedWishError: the request's field cannot be read.
        PolicyError: a receipt is asked for, and the profile has none.
    """

    def __init__(self, unsealer: Unsealer, exchange: OhttpContext, request: HttpRequest, profile: str) -> None:
        self._wish: Wish | None = read_wish(request.head.fields)
        Policy(profile).check({"receipt": Use(self._wish is not None, "the request")})
        self._unsealer = unsealer
        self._exchange = exchange
        self._profile = profile
        self._transcript = Transcript(exchange, request)

    def add(self, content: bytes) -> bytes:
        """Takes the next piece of content, and returns it."""
        self._transcript.add(content)
        return content

    async def end(self, writer: BinaryHttpWriter, status: int) -> bytes:
        """Returns the end of the message: with the signature where it was asked for, else zeros, which are padding."""
        wish = self._wish or NO_WISH
        claims = self._transcript.claim(status, epoch=wish.epoch, evidence=wish.evidence, profile=self._profile)
        try:
            signature = await self._unsealer.sign(self._exchange.header, claims.signing_input)
        except (UnsealError, ReplayCacheFullError, EngineError):  # the key ended long before the answer did
            signature = b""
        end = writer.end(((FIELD, encode64(signature or bytes(SIGNATURE_BYTES))),))
        return end if self._wish and signature else bytes(len(end))
