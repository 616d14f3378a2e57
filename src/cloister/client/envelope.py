"""A request, sealed twice: to the drawn node, then to the gateway; and its answer, opened twice. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import urlsplit

import msgspec

from cloister.client.errors import FailedTryError, FinalRefusalError
from cloister.client.receipts import ReceiptOrder, ReceiptReader
from cloister.private.problems import DATE_TYPE
from cloister.trust.receipts import ReceiptError, read_signature, with_wish
from cloister.trust.sealing import (
    CHUNKED,
    Content,
    Fields,
    HttpRequest,
    MessageError,
    MessageReader,
    OhttpContext,
    Part,
    RequestHead,
    ResponseHead,
    ResponseOpener,
    Trailers,
    UnsealError,
    bucket_bytes,
    choose_configuration,
    encode_request,
    find_field,
    parse_keys,
    seal_chunked_request,
)
from cloister.trust.shape import ShapeError, Unshaper, shape_of
from cloister.trust.tokens.redeem import with_budget
from cloister.trust.transparency.epoch import Epoch, NodeEntry

MAX_REFUSAL_BYTES = 8192
NO_OTHER_DRAW_HELPS = frozenset({400, 403, 405, 413, 415, 417, 421, 431})
"""Gateway statuses that concern the request itself; any other may concern the node or be temporary."""


class BrokenAnswerError(Exception):
    """The answer was cut off or changed. Its text contains no content."""


class Answer:
    """Reads one answer.

    Args:
        outer: the exchange with the gateway.
        inner: the exchange with the node.
        shaped: whether the node's profile requires a traffic shape; then no other answer is accepted.
        receipt: reads the receipt if one was requested; then an answer without one is invalid.

    Attributes:
        head: status and fields of the node's response, once received. From then on the request is never sent again.
        receipt: see above.
        signature: signature at the end of the answer; checked by the receipt, if one was requested.
    """

    def __init__(self, outer: OhttpContext, inner: OhttpContext, *, shaped: bool, receipt: ReceiptReader | None = None) -> None:
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
            BrokenAnswerError: these bytes cannot be opened.
        """
        try:
            return b"".join(self._open_outer(plain) for plain in self._outer_chunks.feed(data))
        except (UnsealError, MessageError, ShapeError, ReceiptError) as error:
            raise BrokenAnswerError(_describe(error)) from None

    @property
    def is_complete(self) -> bool:
        """Whether only padding follows, which must still be read to its end."""
        return self._unshaper.is_complete

    def complete(self) -> bytes:
        """Marks the answer as read except for its padding, and returns the end of the content.

        Raises:
            BrokenAnswerError: the node's response is incomplete.
        """
        try:
            return self._end()
        except (MessageError, ReceiptError) as error:
            raise BrokenAnswerError(_describe(error)) from None

    def close(self) -> bytes:
        """Marks the end of the input, and returns the end of the content; see `feed`.

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
        """Checks a receipt as soon as it arrives: programs disconnect after the last event without reading the end."""
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
    """Returns the message of an error in the form of OpenAI's API, or the title of problem details (RFC 9457); else ""."""
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


TAKEN_FIELDS = frozenset({b"accept", b"content-type", b"cloister-session"})
"""Header fields that are forwarded to the node. Others would identify the client: API key, operating system, version of the
SDK. A session's secret is forwarded, because its sender wants to be recognised."""

DATE_STEP_S = 60
"""Receivers accept a deviation of five minutes, so rounding by half a minute is harmless."""


@dataclass(frozen=True)
class SealedEnvelope:
    """The request to the relay, and the reader of its answer."""

    sealed: bytes
    answer: Answer


def seal_for_node(
    request: HttpRequest,
    node: NodeEntry,
    epoch: Epoch,
    authorization: str,
    now: float,
    order: ReceiptOrder | None = None,
    budget: int | None = None,
    least_bytes: int = 0,
) -> SealedEnvelope:
    """Seals a request to a node and, around it, to the gateway.

    Args:
        request: as sent to the node's server, reduced to `TAKEN_FIELDS` and with the date added.
        node: the drawn node.
        epoch: names the gateway, and the profile that defines the answer's traffic shape.
        authorization: spends one token.
        now: Unix seconds; the date of both layers, which their receivers compare with their clocks.
        order: for a receipt; None for none. The envelope's length is the same.
        budget: output tokens that the blind token pays for, which the node compares with the gateway's value; None omits it.
        least_bytes: of the padded request, as a size class demands.

    Raises:
        RequestTooLargeError: the request is longer than the largest bucket.
        KeyConfigurationError: a key of the epoch cannot be sealed to.
    """
    date = (b"date", write_date(now))
    asked, room = with_wish(with_budget(request, budget), order.wish if order else None)
    message = encode_request(asked)
    inner, inner_exchange = seal_chunked_request(
        choose_configuration(parse_keys(node.keys)), message.ljust(max(bucket_bytes(room), least_bytes), b"\0")
    )
    gateway = urlsplit(epoch.gateway.url)
    fields: Fields = ((b"authorization", authorization.encode()), (b"content-type", CHUNKED.request_type.encode()), date)
    head = RequestHead("POST", gateway.scheme, gateway.netloc, f"{gateway.path.rstrip('/')}/nodes/{node.node_id}", fields)
    outer, outer_exchange = seal_chunked_request(
        choose_configuration(parse_keys(epoch.gateway.keys)), encode_request(HttpRequest(head, inner))
    )
    receipt = ReceiptReader(order, asked, inner_exchange) if order else None
    return SealedEnvelope(
        outer, Answer(outer_exchange, inner_exchange, shaped=shape_of(epoch.profile) is not None, receipt=receipt)
    )


def strip_request(method: str, target: bytes, fields: Fields, content: bytes, now: float) -> HttpRequest:
    """Returns a request without fields that identify the client.

    Args:
        target: path and query.
        fields: header fields of the program; those not in `TAKEN_FIELDS` are dropped.
    """
    kept = tuple((name.lower(), value) for name, value in fields if name.lower() in TAKEN_FIELDS)
    date = (b"date", write_date(now))
    return HttpRequest(RequestHead(method, "https", "localhost", target.decode("ascii"), (*kept, date)), content)


def write_date(now: float) -> bytes:
    """Returns a date, rounded to a minute: the seconds of a clock's error would link the requests of one machine."""
    return formatdate(round(now / DATE_STEP_S) * DATE_STEP_S, usegmt=True).encode()
