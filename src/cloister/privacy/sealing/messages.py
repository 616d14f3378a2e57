"""HTTP messages as binary HTTP carries them (RFC 9292): parts that a reader finds, and whole messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cloister.privacy.sealing.errors import MessageError

Fields = tuple[tuple[bytes, bytes], ...]
"""Field lines in their order: (name in lower case, value), as ASGI has headers."""

_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(rb"(?:[^\x00\r\n\t ](?:[^\x00\r\n]*[^\x00\r\n\t ])?)?")  # RFC 9113, section 8.2.1
_METHOD: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_AUTHORITY: Final = re.compile(r"[!-~]*")
_PATH: Final = re.compile(r"/[!-~]*|\*")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What comes before the content of a request. `authority` may be empty; then `fields` may have `host`."""

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
    """A whole response, with the informational ones that came before it."""

    head: ResponseHead
    content: bytes = b""
    trailers: Fields = ()
    informational: tuple[ResponseHead, ...] = ()


def check_fields(lines: Iterable[tuple[bytes, bytes]]) -> Fields:
    """Returns field lines with names in lower case.

    Raises:
        MessageError: a name is no token, pseudo-fields among them (RFC 9292, section 3.6), or a value cannot be one.
    """
    fields = tuple((name.lower(), value) for name, value in lines)
    if not all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in fields):
        raise MessageError("A header or trailer field has a name or a value that HTTP does not allow.")
    return fields


def check_request_head(head: RequestHead) -> RequestHead:
    """Returns the head if its control data follow HTTP/2 (RFC 9113, section 8.3.1).

    Raises:
        MessageError: they do not.
    """
    rules = ((_METHOD, head.method), (_SCHEME, head.scheme), (_AUTHORITY, head.authority), (_PATH, head.path))
    if not all(rule.fullmatch(value) for rule, value in rules):
        raise MessageError("The method, scheme, authority or path of the request is not one that HTTP allows.")
    return head


def find_field(fields: Fields, name: bytes) -> str | None:
    """Returns the value of the only field `name` (lower case); None when there is none.

    Raises:
        MessageError: it is there more than once.
    """
    values = [value for found, value in fields if found == name]
    if len(values) > 1:
        raise MessageError(f"The field {name.decode()} is there more than once.")
    return values[0].decode("latin-1") if values else None
