"""Downloads files from URLs and resumes interrupted ones (RFC 9110, sections 13.1.5 and 14)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

import httpx

from cloister.models.pulling.downloads import BrokenDownloadError, FileState, LengthMismatchError, Partial
from cloister.models.pulling.replies import AddressRules, open_reply
from cloister.types.errors import ModelError

TIMEOUT_S: Final = 20.0
"""Timeout for connecting, and between two pieces of the file."""
GRACE_S: Final = 60.0
"""After this time the average rate must be at least `_SLOWEST_BYTES_PER_S`."""
_SLOWEST_BYTES_PER_S: Final = 1024
ROOM_EVERY_BYTES: Final = 32 << 20
"""Bytes of a file of unknown length between two checks of the disk space."""
_TRIES: Final = 3
"""Attempts of one command, each of which must make progress."""
_RANGE: Final = re.compile(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18}|\*)", re.ASCII)
_LENGTH: Final = re.compile(r"\d{1,18}", re.ASCII)
_STRONG: Final = re.compile(r'"[!#-~\x80-\xff]*"')
"""An entity tag that is not weak (RFC 9110, section 8.8.3)."""

OnBytes = Callable[[int, int | None], None]


def download_file(
    client: httpx.Client,
    url: str,
    partial: Partial,
    *,
    rules: AddressRules,
    check_room: Callable[[int], None],
    on_bytes: OnBytes = lambda *_: None,
    auth: httpx.Auth | None = None,
    most_bytes: int | None = None,
) -> None:
    """Completes a file from a URL. Starts again if the server has another version of the file, or cannot tell.

    Args:
        rules: rules for the URL and its redirects.
        check_room: called with the expected bytes before the download and during it; raises if they do not fit.
        on_bytes: called with received and total bytes (None if unknown).
        auth: login of the URL's host.
        most_bytes: maximum size of the file; None if unknown.

    Raises:
        BrokenDownloadError: the server does not answer, or the download was interrupted `_TRIES` times, or was too slow.
        LengthMismatchError: the file has more than `most_bytes`.
        ModelError: the server refuses, sends more than declared, or the file would be fetched unverified over plain HTTP.
        OSError: the file cannot be written.
    """
    for left in reversed(range(_TRIES)):
        num_bytes = partial.num_bytes
        try:
            with open_reply(client, url, rules, _continuing(partial), auth) as reply:
                _receive(reply, partial, check_room, on_bytes, most_bytes)
                return
        except httpx.InvalidURL:
            raise ModelError("that is no URL; check it", param="source") from None
        except httpx.HTTPError as error:
            if not left or partial.state is None or partial.num_bytes <= num_bytes:
                what = "run the command again, and it goes on from there" if partial.state else "run the command again"
                raise BrokenDownloadError(f"the download broke off ({type(error).__name__}); {what}") from None


def shown_address(url: str) -> str:
    """Returns a URL without parts that may be secret: login, query and fragment."""
    try:
        bare = httpx.URL(url)
    except httpx.InvalidURL:
        raise ModelError("that is no URL; check it", param="source") from None
    return f"{bare.scheme}://{bare.netloc.decode()}{bare.path}"


def _continuing(partial: Partial) -> dict[str, str]:
    """Returns headers to request the rest of a file, or all of it if it has changed, which only a strong tag shows."""
    if not partial.num_bytes or partial.state is None:
        return {}
    return {"range": f"bytes={partial.num_bytes}-", "if-range": partial.state.etag}


def _receive(
    reply: httpx.Response,
    partial: Partial,
    check_room: Callable[[int], None],
    on_bytes: OnBytes,
    most_bytes: int | None,
) -> None:
    num_here, num_total = _begin(reply, partial)
    if num_here == num_total:
        return  # the process ended between the last byte and the check
    check_room((num_total or num_here) - num_here)
    began_s, num_before, num_unchecked = time.monotonic(), num_here, 0
    with partial.path.open("ab") as file:
        for piece in reply.iter_raw():
            num_here += len(piece)
            num_unchecked += len(piece)
            if most_bytes is not None and num_here > most_bytes:
                raise LengthMismatchError(f"What {reply.url.host} sends", most_bytes)
            if num_total is not None and num_here > num_total:
                partial.remove()
                raise ModelError(f"{reply.url.host} sends more bytes than it said; nothing was kept")
            if num_unchecked > ROOM_EVERY_BYTES:
                check_room(0)
                num_unchecked = 0
            file.write(piece)
            file.flush()  # a process that is killed loses nothing
            on_bytes(num_here, num_total)
            took_s = time.monotonic() - began_s
            if took_s > GRACE_S and num_here - num_before < took_s * _SLOWEST_BYTES_PER_S:
                raise httpx.ReadTimeout("the file comes too slowly")
    if num_total is not None and num_here != num_total:
        raise httpx.ReadError("the file does not have the length that was said")


def _begin(reply: httpx.Response, partial: Partial) -> tuple[int, int | None]:
    """Returns the offset of a reply's bytes, and the total length (None if unknown).

    Raises:
        ModelError: it is neither the whole file nor the rest of the existing version.
    """
    num_here, state = partial.num_bytes, partial.state
    if reply.status_code == 200:
        etag, length = reply.headers.get("etag", ""), reply.headers.get("content-length", "")
        is_known = _STRONG.fullmatch(etag) is not None and _LENGTH.fullmatch(length) is not None
        partial.begin(FileState(etag, int(length)) if is_known else None)
        return 0, int(length) if _LENGTH.fullmatch(length) else None
    begins, num_total = _read_range(reply)
    if state is not None and num_total == state.num_bytes:
        if reply.status_code == 416 and num_here == num_total:
            return num_here, num_total
        # A server that ignores If-Range sends the rest of the current version.
        if reply.status_code == 206 and num_here and begins == num_here and reply.headers.get("etag") == state.etag:
            return num_here, num_total
    if reply.status_code in (206, 416):
        partial.remove()  # the next attempt asks for the whole file
    kind = BrokenDownloadError if reply.is_server_error else ModelError
    raise kind(f"{reply.url.host} answered {reply.status_code}; check the URL, or run the command again")


def _read_range(reply: httpx.Response) -> tuple[int | None, int | None]:
    """Returns the offset of a reply's content and the length of the whole file, None for values missing in its
    `Content-Range`."""
    found = _RANGE.fullmatch(reply.headers.get("content-range", ""))
    begins, num_total = found.groups() if found else (None, None)
    return None if begins is None else int(begins), None if num_total in (None, "*") else int(num_total)
