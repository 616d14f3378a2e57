"""The node's side of receipts: follows one answer and writes its end, of one length whether a receipt was asked for or not."""

from __future__ import annotations

from cloister.privacy.policy import Policy, Use
from cloister.privacy.receipts import FIELD, NO_WISH, SIGNATURE_BYTES, Transcript, Wish, encode64, read_wish
from cloister.privacy.sealing import BinaryHttpWriter, Exchange, HttpRequest, ReplayCacheFullError, UnsealError
from cloister.sealed.unsealing import Unsealer
from cloister.types.errors import EngineError


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

    def __init__(self, unsealer: Unsealer, exchange: Exchange, request: HttpRequest, profile: str) -> None:
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
