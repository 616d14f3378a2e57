"""HTTP messages in binary HTTP (RFC 9292): the parts a reader emits, whole messages, variable-length integers, padding."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cloister.trust.sealing.errors import MessageError
from cloister.types.errors import RequestTooLargeError

Fields = tuple[tuple[bytes, bytes], ...]
"""Field lines in order: (name in lower case, value), like ASGI headers."""

_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(rb"(?:[^\x00\r\n\t ](?:[^\x00\r\n]*[^\x00\r\n\t ])?)?")  # RFC 9113, section 8.2.1
_METHOD: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_AUTHORITY: Final = re.compile(r"[!-~]*")
_PATH: Final = re.compile(r"/[!-~]*|\*")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request. `authority` may be empty; then `fields` may have `host`."""

    method: str
    scheme: str
    authority: str
    path: str
    fields: Fields = ()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A status from 200 to 599 and its header fields, or an informational one from 100 to 199."""

    status: int
    fields: Fields = ()

    @property
    def is_final(self) -> bool:
        return self.status >= 200


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of content, at least one byte."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Trailers:
    """Fields after the content, at least one."""

    fields: Fields


Part = RequestHead | ResponseHead | Content | Trailers


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A whole request."""

    head: RequestHead
    content: bytes = b""
    trailers: Fields = ()


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response, with preceding informational ones."""

    head: ResponseHead
    content: bytes = b""
    trailers: Fields = ()
    informational: tuple[ResponseHead, ...] = ()


def check_fields(lines: Iterable[tuple[bytes, bytes]]) -> Fields:
    """Returns field lines with names in lower case.

    Raises:
        MessageError: a name is not a token (including pseudo-fields, RFC 9292, section 3.6), or a value is invalid.
    """
    fields = tuple((name.lower(), value) for name, value in lines)
    if not all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in fields):
        raise MessageError("A header or trailer field has a name or a value that HTTP does not allow.")
    return fields


def check_request_head(head: RequestHead) -> RequestHead:
    """Returns the head if its control data are valid in HTTP/2 (RFC 9113, section 8.3.1).

    Raises:
        MessageError: they are invalid.
    """
    rules = ((_METHOD, head.method), (_SCHEME, head.scheme), (_AUTHORITY, head.authority), (_PATH, head.path))
    if not all(rule.fullmatch(value) for rule, value in rules):
        raise MessageError("The method, scheme, authority or path of the request is not one that HTTP allows.")
    return head


def find_field(fields: Fields, name: bytes) -> str | None:
    """Returns the value of the only field `name` (lower case); None if absent.

    Raises:
        MessageError: it occurs more than once.
    """
    values = [value for found, value in fields if found == name]
    if len(values) > 1:
        raise MessageError(f"The field {name.decode()} is there more than once.")
    return values[0].decode("latin-1") if values else None


# Variable-length integers of QUIC (RFC 9000, section 16): one, two, four or eight bytes, up to 2^62 - 1.


MAX_VARINT: Final = 2**62 - 1


def encode_varint(value: int) -> bytes:
    """Returns `value` in the shortest encoding.

    Raises:
        ValueError: it is negative or above `MAX_VARINT`.
    """
    for power, num_bytes in enumerate((1, 2, 4, 8)):
        if 0 <= value < 1 << (8 * num_bytes - 2):
            return (value | power << (8 * num_bytes - 2)).to_bytes(num_bytes, "big")
    raise ValueError("a QUIC integer is from 0 to 2^62 - 1")


def varint_bytes(first: int) -> int:
    """Returns the length in bytes of an integer with the first byte `first`."""
    return 1 << (first >> 6)


def decode_varint(data: bytes | bytearray) -> int:
    """Returns the integer that fills the whole of `data`, whose length is `varint_bytes(data[0])`."""
    return int.from_bytes(data, "big") & (1 << (8 * len(data) - 2)) - 1


# Pads requests to buckets of 4^n KiB, so that lengths reveal little.


SMALLEST_BUCKET_BYTES: Final = 1024
LARGEST_BUCKET_BYTES: Final = SMALLEST_BUCKET_BYTES * 4**7
"""16 MiB."""


def bucket_bytes(num_bytes: int) -> int:
    """Returns the length of the smallest bucket that holds `num_bytes`: 1, 4, 16, 64, 256 KiB, 1, 4 or 16 MiB.

    Raises:
        RequestTooLargeError: there is none.
    """
    bucket = SMALLEST_BUCKET_BYTES
    while bucket < num_bytes:
        bucket *= 4
    if bucket > LARGEST_BUCKET_BYTES:
        raise RequestTooLargeError(f"A sealed request holds {LARGEST_BUCKET_BYTES // 2**20} MiB; make it shorter.")
    return bucket
