"""Files from URLs, which are gone on with where a download broke off (RFC 9110, sections 13.1.5 and 14)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from typing import Final

import httpx

from cloister.models.pulling.downloads import BrokenDownloadError, FileState, Partial
from cloister.types.errors import ModelError

TIMEOUT_S: Final = 20.0
"""To connect, and between two pieces of the file."""
_TRIES: Final = 3
"""Attempts of one command, each of which must bring something."""
_RANGE: Final = re.compile(r"bytes (?:(\d{1,18})-\d{1,18}|\*)/(\d{1,18})")
_STRONG: Final = re.compile(r'"[!#-~\x80-\xff]*"')
"""An entity tag that is not weak (RFC 9110, section 8.8.3)."""

OnBytes = Callable[[int, int | None], None]


def download_file(
    client: httpx.Client,
    url: str,
    partial: Partial,
    *,
    is_pinned: bool,
    check_room: Callable[[int], None],
    on_bytes: OnBytes = lambda *_: None,
    auth: httpx.Auth | None = None,
    trusted_hosts: Collection[str] = (),
) -> None:
    """Completes a file with what a URL leads to. It begins anew where the server has another state of the file, or cannot tell.

    Args:
        is_pinned: the file's digest is known, so that plain HTTP may carry it.
        check_room: told how many bytes will come, before any does; raises where they do not fit.
        on_bytes: told how many bytes are there, out of how many (None: the server does not say).
        auth: login of the host that the URL names.
        trusted_hosts: those that plain HTTP may be used with.

    Raises:
        BrokenDownloadError: the server does not answer, or the file was cut off `_TRIES` times.
        ModelError: the server refuses, or plain HTTP would carry the file unchecked.
        OSError: the file cannot be written.
    """
    for left in reversed(range(_TRIES)):
        num_bytes = partial.num_bytes
        try:
            check_scheme(httpx.URL(url), is_pinned, trusted_hosts)
            headers = {"accept-encoding": "identity", **_continuing(partial)}
            with client.stream("GET", url, headers=headers, auth=auth or httpx.USE_CLIENT_DEFAULT) as reply:
                for step in (*reply.history, reply):
                    check_scheme(step.url, is_pinned, trusted_hosts)
                _receive(reply, partial, check_room, on_bytes)
                return
        except httpx.InvalidURL:
            raise ModelError("that is no URL; check it", param="source") from None
        except httpx.HTTPError as error:
            if not left or partial.state is None or partial.num_bytes <= num_bytes:
                what = "run the command again, and it goes on from there" if partial.state else "run the command again"
                raise BrokenDownloadError(f"the download broke off ({type(error).__name__}); {what}") from None


def shown_address(url: str) -> str:
    """Returns a URL without what may be somebody's secret: login, query and fragment."""
    try:
        bare = httpx.URL(url)
    except httpx.InvalidURL:
        raise ModelError("that is no URL; check it", param="source") from None
    return f"{bare.scheme}://{bare.netloc.decode()}{bare.path}"


def _continuing(partial: Partial) -> dict[str, str]:
    """Returns headers that ask for the rest of a file, or for all of it if it has changed; only a strong tag tells that."""
    if not partial.num_bytes or partial.state is None:
        return {}
    return {"range": f"bytes={partial.num_bytes}-", "if-range": partial.state.etag}


def _receive(reply: httpx.Response, partial: Partial, check_room: Callable[[int], None], on_bytes: OnBytes) -> None:
    num_here, num_total = _begin(reply, partial)
    if num_here == num_total:
        return  # the process ended between the last byte and the check
    check_room((num_total or num_here) - num_here)
    with partial.path.open("ab") as file:
        for piece in reply.iter_raw():
            file.write(piece)
            file.flush()  # a process that is killed loses nothing
            num_here += len(piece)
            on_bytes(num_here, num_total)
    if num_total is not None and num_here > num_total:
        partial.remove()
    if num_total is not None and num_here != num_total:
        raise httpx.ReadError("the file does not have the length that was said")


def _begin(reply: httpx.Response, partial: Partial) -> tuple[int, int | None]:
    """Returns how many bytes are there before those of a reply, and of how many (None: the server does not say).

    Raises:
        ModelError: it brings neither the file nor the rest of the state that is there.
    """
    num_here, state = partial.num_bytes, partial.state
    if reply.status_code == 200:
        etag, length = reply.headers.get("etag", ""), reply.headers.get("content-length", "")
        is_known = _STRONG.fullmatch(etag) is not None and length.isdecimal()
        partial.begin(FileState(etag, int(length)) if is_known else None)
        return 0, int(length) if length.isdecimal() else None
    begins, num_total = _read_range(reply)
    if state is not None and num_total == state.num_bytes:
        if reply.status_code == 416 and num_here == num_total:
            return num_here, num_total
        # A server that ignores If-Range sends the rest of what the file is now.
        if reply.status_code == 206 and num_here and begins == num_here and reply.headers.get("etag") == state.etag:
            return num_here, num_total
    if reply.status_code in (206, 416):
        partial.remove()  # the next attempt asks for the whole file
    kind = BrokenDownloadError if reply.is_server_error else ModelError
    raise kind(f"{reply.url.host} answered {reply.status_code}; check the URL, or run the command again")


def _read_range(reply: httpx.Response) -> tuple[int | None, int | None]:
    """Returns where the content of a reply begins and how long the whole file is, None for what its `Content-Range` lacks."""
    found = _RANGE.fullmatch(reply.headers.get("content-range", ""))
    begins, num_total = found.groups() if found else (None, None)
    return None if begins is None else int(begins), None if num_total is None else int(num_total)


def check_scheme(url: httpx.URL, is_pinned: bool, trusted_hosts: Collection[str] = ()) -> None:
    """Raises ModelError for plain HTTP, unless a digest, the host or the machine itself vouches for what comes."""
    if url.scheme == "https" or (url.scheme == "http" and (is_pinned or url.host in trusted_hosts or _is_loopback(url.host))):
        return
    raise ModelError(
        "over plain HTTP anybody on the way may change the file; give an https:// URL, or the file's digest with --sha256",
        param="source",
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
