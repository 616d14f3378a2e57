"""CORS (Fetch standard, section 3.2): no other origin, unless the operator allowed it.

Before a browser sends JSON or an API key across origins, it sends a preflight request without a key, which is answered here,
before authentication. A page of an origin that is not allowed cannot read replies.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.errors import OriginError
from cloister.server.middleware.failures import send_error
from cloister.types.errors import ConfigError

ANY: Final = "*"
METHODS: Final = b"GET, POST, DELETE"
MAX_AGE_S: Final = b"600"
EXPOSED: Final = b"retry-after, x-request-id, cloister-ignored-fields, " + b", ".join(
    f"x-ratelimit-{what}-{kind}".encode() for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
_NAMES: Final = re.compile(rb"[A-Za-z0-9-]+(?:[ \t]*,[ \t]*[A-Za-z0-9-]+)*")
_MAX_NAMES_BYTES: Final = 1024


def parse_origins(setting: str) -> frozenset[str]:
    """Returns the origins in a setting.

    Raises:
        ConfigError: one is not an origin.
    """
    origins = frozenset(part.strip().lower() for part in setting.split(",") if part.strip())
    for origin in origins - {ANY}:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
            raise ConfigError(
                "allowed_origins must be origins such as https://chat.example.org, with commas between them, or *",
                param="allowed_origins",
            )
    return origins


def is_allowed(origin: str, origins: Collection[str]) -> bool:
    """Whether pages of an origin may read replies and send forms."""
    return ANY in origins or origin.lower() in origins


class CorsMiddleware:
    """Answers preflights, and states on every reply whether the requesting page may read it.

    Args:
        origins: allowed origins; `*` allows all.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (origin := _header(scope, b"origin")) is None:
            await self._app(scope, receive, send)
            return
        allowed = is_allowed(origin.decode("latin-1"), self._origins)
        if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method") is not None:
            await (_answer_preflight(scope, send, origin) if allowed else send_error(send, OriginError()))
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = [(b"access-control-expose-headers", EXPOSED)] if allowed else []
                message["headers"] = [*message.get("headers", ()), *(_origin(origin) if allowed else _VARY), *exposed]
            await send(message)

        await self._app(scope, receive, send_with_origin)


_VARY: Final = [(b"vary", b"origin")]


def _origin(origin: bytes) -> list[tuple[bytes, bytes]]:
    # Keys are in a header that the page sets itself, and there are no cookies, so credentials need not be allowed.
    return [(b"access-control-allow-origin", origin), (b"access-control-allow-credentials", b"true"), *_VARY]


async def _answer_preflight(scope: Scope, send: Send, origin: bytes) -> None:
    # `*` would not cover Authorization (Fetch, 4.9), so the requested headers are listed, if they are valid names.
    asked = _header(scope, b"access-control-request-headers") or b""
    named = len(asked) <= _MAX_NAMES_BYTES and _NAMES.fullmatch(asked)
    headers = [
        *_origin(origin),
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", asked if named else b"authorization, content-type"),
        (b"access-control-max-age", MAX_AGE_S),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)
