"""The answer on its way back: opened twice, unshaped, read as HTTP, while it is still being written. No I/O, no clock.

Relay bytes -> chunked OHTTP of the gateway -> binary HTTP -> chunked OHTTP of the node -> frames, if the profile has any ->
binary HTTP -> head and content. A flush of the node's server comes out in the call that its last byte was fed in.
"""

from __future__ import annotations

import msgspec

from cloister.client.errors import FailedTryError, FinalRefusalError
from cloister.client.receipts import ReceiptReader
from cloister.privacy.receipts import ReceiptError, read_signature
from cloister.privacy.sealing import (
    CHUNKED,
    Content,
    Exchange,
    MessageError,
    MessageReader,
    Part,
    ResponseHead,
    ResponseOpener,
    Trailers,
    UnsealError,
    find_field,
)
from cloister.privacy.shape import ShapeError, Unshaper
from cloister.sealed.problems import DATE_TYPE

MAX_REFUSAL_BYTES = 8192
NO_OTHER_DRAW_HELPS = frozenset({400, 403, 405, 413, 415, 417, 421, 431})
"""Statuses of the gateway that say something about the request; every other one may be the node's or the moment's."""


class BrokenAnswerError(Exception):
    """The answer broke off, or is not what was sealed. Its text is free of content."""


class Answer:
    """Reads one answer.

    Args:
        outer: the exchange with the gateway.
        inner: the exchange with the node.
        shaped: whether the node's profile promises a shape; then nothing else is taken.
        receipt: follows the answer where a receipt was asked for; then an answer without one is broken.

    Attributes:
        head: status and fields of the node's response, once they are there. From then on the request is never sent again.
        receipt: see above.
        signature: at the end of the answer; the receipt checks it, where one was asked for.
    """

    def __init__(self, outer: Exchange, inner: Exchange, *, shaped: bool, receipt: ReceiptReader | None = None) -> None:
        self.head: ResponseHead | None = None
        self._outer_chunks, self._outer = ResponseOpener(outer), MessageReader()
        self._inner_chunks, self._inner = ResponseOpener(inner), MessageReader()
        self._unshaper = Unshaper(required=shaped)
        self._gateway: ResponseHead | None = None
        self._refusal = bytearray()
        self.receipt = receipt
        self.signature: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes from the relay and returns the content that they complete.

        Raises:
            FailedTryError, FinalRefusalError: the gateway answered in place of the node.
            BrokenAnswerError: these bytes are not what was sealed.
        """
        try:
            return b"".join(self._open_outer(plain) for plain in self._outer_chunks.feed(data))
        except (UnsealError, MessageError, ShapeError, ReceiptError) as error:
            raise BrokenAnswerError(_describe(error)) from None

    @property
    def is_complete(self) -> bool:
        """Whether only padding follows, which is to be read to its end all the same."""
        return self._unshaper.is_complete

    def complete(self) -> bytes:
        """Says that the answer is read, though not its padding, and returns the end of the content.

        Raises:
            BrokenAnswerError: what the node said is not a whole response.
        """
        try:
            return self._end()
        except (MessageError, ReceiptError) as error:
            raise BrokenAnswerError(_describe(error)) from None

    def close(self) -> bytes:
        """Says that no more bytes come, and returns the end of the content; see `feed`.

        Raises:
            BrokenAnswerError: the answer is not complete.
        """
        try:
            return self._close()
        except (UnsealError, MessageError, ShapeError, ReceiptError) as error:
            raise BrokenAnswerError(_describe(error)) from None

    def _close(self) -> bytes:
        content = self._open_outer(self._outer_chunks.close())
        self._outer.close()
        if self._gateway is None or self._gateway.status != 200:
            self._raise_refusal()
        content += self._open_inner(self._inner_chunks.close())
        self._unshaper.close()
        return content + self._end()

    def _end(self) -> bytes:
        content = self._take(self._inner.close())
        if self.receipt is not None and self.receipt.receipt is None and self.head is not None:
            self.receipt.finish(self.head.status, None)
        return content

    def _open_outer(self, plain: bytes) -> bytes:
        content = b""
        for part in self._outer.feed(plain):
            if isinstance(part, ResponseHead) and part.is_final:
                self._gateway = part
                self._check_type(part)
            elif isinstance(part, Content):
                content += self._take_outer(part.data)
        return content

    def _check_type(self, head: ResponseHead) -> None:
        if head.status == 200 and find_field(head.fields, b"content-type") != CHUNKED.response_type:
            raise FailedTryError("the gateway's answer is none of a node")

    def _take_outer(self, data: bytes) -> bytes:
        if self._gateway is not None and self._gateway.status != 200:
            self._refusal += data[: MAX_REFUSAL_BYTES - len(self._refusal)]
            return b""
        return b"".join(self._open_inner(plain) for plain in self._inner_chunks.feed(data))

    def _open_inner(self, plain: bytes) -> bytes:
        return self._take(self._inner.feed(self._unshaper.feed(plain)))

    def _take(self, parts: list[Part]) -> bytes:
        content = b""
        for part in parts:
            if isinstance(part, ResponseHead) and part.is_final:
                self.head = part
            elif isinstance(part, Content):
                content += part.data
                if self.receipt is not None:
                    self.receipt.add(part.data)
            elif isinstance(part, Trailers):
                self._take_signature(read_signature(part.fields))
        return content

    def _take_signature(self, signature: bytes | None) -> None:
        """Checks a receipt as soon as it is there: programs that saw the last event hang up without reading the end."""
        self.signature = signature
        if self.receipt is not None and self.head is not None and signature is not None:
            self.receipt.finish(self.head.status, signature)

    def _raise_refusal(self) -> None:
        status = 0 if self._gateway is None else self._gateway.status
        message = read_message(bytes(self._refusal)) or "it gave no reason"
        if DATE_TYPE.encode() in self._refusal:
            message = "its clock and this machine's are more than five minutes apart; set this machine's clock"
        if status in NO_OTHER_DRAW_HELPS:
            raise FinalRefusalError(f"The gateway refused the request ({status}): {message}")
        raise FailedTryError(f"the gateway answered {status}: {message}")


def read_message(body: bytes) -> str:
    """Returns the message of an error in the form of OpenAI's API, or the title of problem details (RFC 9457); else nothing."""
    try:
        error = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(error, dict):
        return ""
    inner = error.get("error")
    message = inner.get("message") if isinstance(inner, dict) else error.get("detail") or error.get("title")
    return " ".join(message.split())[:500] if isinstance(message, str) else ""


def _describe(error: Exception) -> str:
    if isinstance(error, ShapeError | ReceiptError):
        return str(error)
    return "the sealed answer broke off, or was changed on its way"
