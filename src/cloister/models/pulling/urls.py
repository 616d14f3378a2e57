"""GGUF files from URLs."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from cloister.types.errors import ModelError

TIMEOUT_S: Final = 20.0
"""To connect, and between two pieces of the file."""
_PIECE_BYTES: Final = 1 << 20


def download_file(
    url: str,
    target: Path,
    *,
    is_pinned: bool,
    check_room: Callable[[int], None],
    on_bytes: Callable[[int, int | None], None] = lambda *_: None,
) -> None:
    """Writes what a URL leads to into `target`.

    Args:
        is_pinned: the file's digest is known, so that plain HTTP may carry it.
        check_room: told how many bytes will come, before any does; raises where they do not fit.
        on_bytes: told how many bytes came, out of how many (None: the server does not say).

    Raises:
        ModelError: the server does not answer or refuses, the file is cut off, or plain HTTP would carry it unchecked.
        OSError: it cannot be written.
    """
    try:
        _check_scheme(httpx.URL(url), is_pinned)
        with httpx.stream(
            "GET", url, timeout=TIMEOUT_S, follow_redirects=True, headers={"accept-encoding": "identity"}
        ) as reply:
            for step in (*reply.history, reply):
                _check_scheme(step.url, is_pinned)
            if reply.status_code != 200:
                raise ModelError(f"{reply.url.host} answered {reply.status_code}; check the URL")
            length = reply.headers.get("content-length")
            num_total = int(length) if length is not None and length.isdigit() else None
            check_room(num_total or 0)
            num_bytes = 0
            with target.open("wb") as file:
                for piece in reply.iter_bytes(_PIECE_BYTES):
                    file.write(piece)
                    num_bytes += len(piece)
                    on_bytes(num_bytes, num_total)
    except httpx.InvalidURL:
        raise ModelError("that is no URL; check it", param="source") from None
    except httpx.HTTPError as error:
        raise ModelError(f"the download broke off ({type(error).__name__}); run the command again") from None


def _check_scheme(url: httpx.URL, is_pinned: bool) -> None:
    if url.scheme == "https" or (url.scheme == "http" and (is_pinned or _is_loopback(url.host))):
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
