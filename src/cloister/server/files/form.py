"""Uploads as multipart/form-data (RFC 7578): a few small fields, and one file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from typing import Final

from cloister.server.errors import invalid

MAX_PARTS: Final = 16
MAX_HEAD_BYTES: Final = 4096
"""Of one part's headers: reading them takes time with the square of their length."""
_MAX_BOUNDARY: Final = 70


@dataclass(frozen=True, slots=True)
class FormPart:
    """One part of a form. Its text says nothing of content."""

    data: bytes
    filename: str | None

    def __repr__(self) -> str:
        return f"FormPart(num_bytes={len(self.data)})"


def read_form(content_type: str, body: bytes) -> Mapping[str, FormPart]:
    """Returns the parts of a form by their names; of two with one name, the last.

    Raises:
        InvalidRequestError: it is no form.
    """
    boundary = _boundary(content_type)
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS:
        raise invalid(f"The form has more than {MAX_PARTS} parts.", code="invalid_form")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise _broken()
    return dict(_read_part(piece) for piece in pieces[:-1])


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    found = header.get_boundary()
    if not found or len(found) > _MAX_BOUNDARY or not found.isascii():
        raise _broken()
    return found.encode()


def _read_part(piece: bytes) -> tuple[str, FormPart]:
    head, separator, data = piece.lstrip(b" \t").partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise invalid(f"A part of the form has more than {MAX_HEAD_BYTES} bytes of headers.", code="invalid_form")
    # Names are UTF-8 as they stand (RFC 7578, 5.1).
    headers = HeaderParser().parsestr(head.removeprefix(b"\r\n").decode(errors="replace"))
    name = headers.get_param("name", header="content-disposition")
    if not separator or not isinstance(name, str):
        raise _broken()
    return name, FormPart(data, headers.get_filename())


def _broken() -> Exception:
    return invalid("The body must be multipart/form-data with the parts `file` and `purpose`.", code="invalid_form")
