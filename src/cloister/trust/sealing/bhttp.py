"""Binary HTTP (RFC 9292): encodes and decodes messages whole, reads and writes them as streams. No I/O, no clock.

Whole messages are written with known lengths, streams with indeterminate ones; `MessageReader` reads all four forms, piece by
piece."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Final, TypeVar

from cloister.trust.sealing.errors import MessageError
from cloister.trust.sealing.messages import (
    Content,
    Fields,
    HttpRequest,
    HttpResponse,
    Part,
    RequestHead,
    ResponseHead,
    Trailers,
    check_fields,
    check_request_head,
    decode_varint,
    encode_varint,
    varint_bytes,
)

MAX_HEAD_BYTES: Final = 64 * 1024
"""Maximum length of a head or trailer section in bytes: these are buffered until complete."""

MAX_LINES: Final = 512
"""Maximum number of field lines in one section: each costs a reader far more than its minimum of three bytes."""

FREE_CHUNKS: Final = 1024
BYTES_PER_CHUNK: Final = 256
"""Limit on the chunks of a request: `FREE_CHUNKS`, and one more for this many bytes. Reading 16 MiB in chunks of one byte would
take a minute. Responses have no such limit."""

_T = TypeVar("_T")
_Step = Generator[None, None, _T]
"""A parser step that yields whenever it needs more bytes."""


class MessageReader:
    """Parses bytes into parts: a head (after informational ones), contents, trailers if any.

    A message may end before a length that would be zero (section 3.8); an end anywhere else is an error, as are non-zero bytes
    after it.

    Args:
        max_head_bytes: maximum length of a head or trailer section.
    """

    def __init__(self, max_head_bytes: int = MAX_HEAD_BYTES) -> None:
        self._max_head_bytes = max_head_bytes
        self._room = max_head_bytes
        self._buffer = bytearray()
        self._at_end = False
        self._parts: list[Part] = []
        self._failed = False
        self._reading = self._read_message()

    def feed(self, data: bytes) -> list[Part]:
        """Adds the next bytes and returns the parts that are now complete, and available content.

        Raises:
            MessageError: the message is invalid; nothing after it is read.
        """
        self._buffer += data
        return self._go_on()

    def close(self) -> list[Part]:
        """Marks the end of the input, and returns the remaining parts.

        Raises:
            MessageError: the message is cut off.
        """
        self._at_end = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        if self._failed:
            raise _invalid()
        try:
            next(self._reading, None)
        except MessageError:
            self._failed = True
            raise
        parts, self._parts = self._parts, []
        return parts

    def _read_message(self) -> _Step[None]:
        form = yield from self._integer()
        if form > 3:
            raise _invalid()
        is_known = form < 2
        if form in (0, 2):
            head = yield from self._control_data()
            fields = yield from self._fields(is_known)
            self._parts.append(RequestHead(head.method, head.scheme, head.authority, head.path, fields))
        else:
            yield from self._response_heads(is_known)
        self._room = self._max_head_bytes
        yield from (self._known_content() if is_known else self._chunks(is_bounded=form == 2))
        trailers = yield from self._fields(is_known)
        if trailers:
            self._parts.append(Trailers(trailers))
        yield from self._padding()

    def _response_heads(self, is_known: bool) -> _Step[None]:
        status = 0
        while status < 200:
            status = yield from self._integer()
            if not 100 <= status <= 599:
                raise _invalid()
            fields = yield from self._fields(is_known)
            self._parts.append(ResponseHead(status, fields))

    def _control_data(self) -> _Step[RequestHead]:
        values = []
        for _ in range(4):
            value = yield from self._string()
            values.append(value.decode("latin-1"))
        method, scheme, authority, path = values
        return check_request_head(RequestHead(method, scheme, authority, path))

    def _fields(self, is_known: bool) -> _Step[Fields]:
        """Reads a header or trailer section: with a preceding length, or up to an empty name."""
        if (yield from self._is_over()):
            return ()
        lines: list[tuple[bytes, bytes]] = []
        if is_known:
            length = yield from self._integer()
            lines = _split(MessageReader(), (yield from self._bytes(length)))
        else:
            while (yield from self._line(lines)):
                pass
        return check_fields(lines)

    def _line(self, lines: list[tuple[bytes, bytes]]) -> _Step[bool]:
        """Reads one field line; returns False at an empty name."""
        name = yield from self._string()
        if not name:
            return False
        value = yield from self._string()
        if len(lines) == MAX_LINES:
            raise MessageError(f"A section of the binary HTTP message has more than {MAX_LINES} fields.")
        lines.append((name, value))
        return True

    def _known_content(self) -> _Step[None]:
        if (yield from self._is_over()):
            return
        left = yield from self._integer()
        yield from self._content(left)

    def _chunks(self, *, is_bounded: bool) -> _Step[None]:
        if (yield from self._is_over()):
            return
        left = FREE_CHUNKS * BYTES_PER_CHUNK
        while length := (yield from self._integer()):
            left += length - BYTES_PER_CHUNK
            if is_bounded and left < 0:
                raise MessageError("The content of the binary HTTP request is cut too finely; send larger chunks.")
            self._room = self._max_head_bytes
            yield from self._content(length)

    def _content(self, left: int) -> _Step[None]:
        while left:
            yield from self._need(1)
            data = bytes(self._buffer[:left])
            del self._buffer[:left]
            left -= len(data)
            self._parts.append(Content(data))

    def _padding(self) -> _Step[None]:
        while not (yield from self._is_over()):
            if any(self._buffer):
                raise _invalid()
            self._buffer.clear()

    def _string(self) -> _Step[bytes]:
        length = yield from self._integer()
        return (yield from self._bytes(length))

    def _integer(self) -> _Step[int]:
        yield from self._need(1)
        return decode_varint((yield from self._bytes(varint_bytes(self._buffer[0]))))

    def _bytes(self, length: int) -> _Step[bytes]:
        self._room -= length
        if self._room < 0:
            raise MessageError(f"The head of the binary HTTP message is longer than {self._max_head_bytes} bytes.")
        yield from self._need(length)
        data = bytes(self._buffer[:length])
        del self._buffer[:length]
        return data

    def _need(self, length: int) -> _Step[None]:
        while len(self._buffer) < length:
            if self._at_end:
                raise _invalid()
            yield

    def _is_over(self) -> _Step[bool]:
        """Returns whether the message ends here, once that is known."""
        while not self._buffer and not self._at_end:
            yield
        return not self._buffer


def _split(reader: MessageReader, section: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the field lines that fill a section of known length."""
    reader._room = len(section)
    reader._buffer += section
    reader._at_end = True  # so that no step of it needs more input
    lines: list[tuple[bytes, bytes]] = []
    while reader._buffer:
        num_lines = len(lines)
        next(reader._line(lines), None)
        if len(lines) == num_lines:
            raise _invalid()  # an empty name
    return lines


def _invalid() -> MessageError:
    return MessageError("The binary HTTP message is invalid or cut off; encode it as RFC 9292 says.")


KNOWN_REQUEST: Final = b"\x00"
KNOWN_RESPONSE: Final = b"\x01"
INDETERMINATE_REQUEST: Final = b"\x02"
INDETERMINATE_RESPONSE: Final = b"\x03"


def encode_request(request: HttpRequest, *, padded_to: int = 0) -> bytes:
    """Returns a known-length request; empty parts at the end are omitted (section 3.8).

    Args:
        padded_to: length in bytes to which zeros are added; none if the message is longer.

    Raises:
        MessageError: a part is not valid HTTP.
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
    """Writes an indeterminate-length message part by part: heads, contents, then `end`.

    Send the returned bytes in order. A message without its `end` is invalid, so a reader detects that it was cut off.
    """

    def __init__(self) -> None:
        self._began = False
        self._is_open = False

    @property
    def has_head(self) -> bool:
        """Whether a head was written, including an informational one."""
        return self._began

    def head(self, head: RequestHead | ResponseHead) -> bytes:
        """Returns the head of a message, or an informational response that precedes it.

        Raises:
            MessageError: a part is not valid HTTP.
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
        """Returns one chunk of content; empty for no data, because an empty chunk would be the end."""
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
