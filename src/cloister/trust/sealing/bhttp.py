"""Encodes and decodes binary HTTP (RFC 9292). No I/O, no clock.

Whole messages are written with known lengths, streams with indeterminate ones; `MessageReader` reads both, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cloister.trust.sealing.bhttp_reader import MessageReader
from cloister.trust.sealing.errors import MessageError
from cloister.trust.sealing.messages import (
    Content,
    Fields,
    HttpRequest,
    HttpResponse,
    RequestHead,
    ResponseHead,
    Trailers,
    check_fields,
    check_request_head,
    encode_varint,
)

KNOWN_REQUEST: Final = b"\x00"
KNOWN_RESPONSE: Final = b"\x01"
INDETERMINATE_REQUEST: Final = b"\x02"
INDETERMINATE_RESPONSE: Final = b"\x03"


def encode_request(request: HttpRequest, *, padded_to: int = 0) -> bytes:
    """Returns a known-length request; empty parts at the end are left out (section 3.8).

    Args:
        padded_to: length in bytes up to which zeros follow; none when the message is longer.

    Raises:
        MessageError: a part is none that HTTP allows.
    """
    head = check_request_head(request.head)
    parts = [_known_fields(head.fields), _prefixed(request.content), _known_fields(request.trailers)]
    return (KNOWN_REQUEST + _control_data(head) + _without_empty_end(parts)).ljust(padded_to, b"\0")


def encode_response(response: HttpResponse, *, padded_to: int = 0) -> bytes:
    """Returns a known-length response; see `encode_request`."""
    _check_status(response.head, is_final=True)
    message = bytearray(KNOWN_RESPONSE)
    for head in response.informational:
        _check_status(head, is_final=False)
        message += encode_varint(head.status) + _known_fields(head.fields)
    parts = [_known_fields(response.head.fields), _prefixed(response.content), _known_fields(response.trailers)]
    message += encode_varint(response.head.status) + _without_empty_end(parts)
    return bytes(message).ljust(padded_to, b"\0")


def decode_request(message: bytes) -> HttpRequest:
    """Reads a whole request of either form.

    Raises:
        MessageError: it is invalid, cut off, or a response.
    """
    head, content, trailers, informational = _decode(message)
    if not isinstance(head, RequestHead) or informational:
        raise MessageError("The binary HTTP message is a response where a request is expected.")
    return HttpRequest(head, content, trailers)


def decode_response(message: bytes) -> HttpResponse:
    """Reads a whole response of either form; see `decode_request`."""
    head, content, trailers, informational = _decode(message)
    if not isinstance(head, ResponseHead):
        raise MessageError("The binary HTTP message is a request where a response is expected.")
    return HttpResponse(head, content, trailers, informational)


class BinaryHttpWriter:
    """Writes an indeterminate-length message, each part when it is there: heads, contents, then `end`.

    What is returned is to be sent in that order. A message without its `end` is invalid, so a reader sees that it broke off.
    """

    def __init__(self) -> None:
        self._began = False
        self._is_open = False

    @property
    def has_head(self) -> bool:
        """Whether a head was written, an informational one included."""
        return self._began

    def head(self, head: RequestHead | ResponseHead) -> bytes:
        """Returns the head of a message, or an informational response that precedes it.

        Raises:
            MessageError: a part is none that HTTP allows.
        """
        assert not self._is_open, "a message has one head"
        begin = b"" if self._began else INDETERMINATE_REQUEST if isinstance(head, RequestHead) else INDETERMINATE_RESPONSE
        if isinstance(head, RequestHead):
            control = _control_data(check_request_head(head))
            self._is_open = True
        else:
            _check_status(head, is_final=head.is_final)
            control = encode_varint(head.status)
            self._is_open = head.is_final
        self._began = True
        return begin + control + _field_lines(head.fields) + b"\0"

    def content(self, data: bytes) -> bytes:
        """Returns one chunk of content; nothing for no data, since an empty chunk would be the end."""
        assert self._is_open, "content follows a final head"
        return _prefixed(data) if data else b""

    def end(self, trailers: Iterable[tuple[bytes, bytes]] = (), *, padding: int = 0) -> bytes:
        """Returns the end of the content, the trailers, and `padding` zeros."""
        assert self._is_open, "a message ends once"
        self._is_open = False
        return b"\0" + _field_lines(trailers) + b"\0" + bytes(padding)


def _decode(message: bytes) -> tuple[RequestHead | ResponseHead, bytes, Fields, tuple[ResponseHead, ...]]:
    reader = MessageReader(max_head_bytes=len(message))
    head: RequestHead | ResponseHead | None = None
    content, trailers, informational = bytearray(), Fields(()), []
    for part in (*reader.feed(message), *reader.close()):
        if isinstance(part, Content):
            content += part.data
        elif isinstance(part, Trailers):
            trailers = part.fields
        elif isinstance(part, ResponseHead) and not part.is_final:
            informational.append(part)
        else:
            head = part
    assert head is not None, "a reader that closes has seen a head"
    return head, bytes(content), trailers, tuple(informational)


def _control_data(head: RequestHead) -> bytes:
    return b"".join(_prefixed(value.encode("ascii")) for value in (head.method, head.scheme, head.authority, head.path))


def _check_status(head: ResponseHead, *, is_final: bool) -> None:
    if not (200 <= head.status <= 599 if is_final else 100 <= head.status <= 199):
        raise MessageError("The status is not one that a response may have at this place.")


def _field_lines(lines: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(_prefixed(name) + _prefixed(value) for name, value in check_fields(lines))


def _known_fields(lines: Iterable[tuple[bytes, bytes]]) -> bytes:
    return _prefixed(_field_lines(lines))


def _prefixed(data: bytes) -> bytes:
    return encode_varint(len(data)) + data


def _without_empty_end(parts: list[bytes]) -> bytes:
    while parts and parts[-1] == b"\0":
        parts.pop()
    return b"".join(parts)
