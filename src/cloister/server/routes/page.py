"""The web page at `/`: static files, served without a key because they hold no user data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from cloister.server.route_table import RouteTable
from cloister.types.errors import NotFoundError

INDEX: Final = "index.html"
ASSETS_PATH: Final = "/page/"
"""Prefix of a folder whose name changes with the content of any file, so that browsers may cache the files forever."""
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_CONTENT_SECURITY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _CONTENT_SECURITY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""No inline code, no other origin, no markup from text (Trusted Types), no framing."""

router = RouteTable()


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    body: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True)
class Page:
    """Every file of the page, by name.

    Attributes:
        digest: digest of all files; part of the address of each but the first.
    """

    digest: str
    assets: Mapping[str, Asset]


@cache
def read_page() -> Page:
    """Reads the files, and inserts the addresses of the others into the first one."""
    raw = {
        entry.name: entry.read_bytes() for entry in files("cloister.server").joinpath("page").iterdir() if _is_asset(entry.name)
    }
    digest = _digest(b"".join(name.encode() + b"\0" + raw[name] + b"\0" for name in sorted(raw)))
    raw[INDEX] = raw[INDEX].replace(b"{assets}", f"{ASSETS_PATH}{digest}".encode())
    return Page(digest, {name: _asset(name, body) for name, body in raw.items()})


@router.route("/", ["GET", "HEAD"])
async def show_page(request: Request) -> Response:
    """Returns the page itself; browsers revalidate it each time."""
    return _answer(request, read_page().assets[INDEX], "no-cache")


@router.route(ASSETS_PATH + "{digest}/{name}", ["GET", "HEAD"])
async def show_asset(request: Request, digest: str, name: str) -> Response:
    """Returns one of its files."""
    page = read_page()
    if digest != page.digest or name == INDEX or name not in page.assets:
        raise NotFoundError("The page has no such file; load the page again.", code="unknown_route")
    return _answer(request, page.assets[name], "public, max-age=31536000, immutable")


def _answer(request: Request, asset: Asset, caching: str) -> Response:
    headers = {**HEADERS, "etag": asset.etag, "cache-control": caching}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _is_asset(name: str) -> bool:
    return PurePath(name).suffix in _MEDIA_TYPES


def _asset(name: str, body: bytes) -> Asset:
    return Asset(body, _MEDIA_TYPES[PurePath(name).suffix], f'"{_digest(body)}"')


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
