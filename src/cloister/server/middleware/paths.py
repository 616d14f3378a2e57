"""Routes without the `/v1` prefix, for clients whose base URL lacks it."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX: Final = "/v1"
UNPREFIXED: Final = frozenset({"/chat/completions", "/completions", "/models", "/embeddings", "/responses", "/messages"})
"""Only these: what else the server knows stands where it is documented."""


class Prefixed:
    """Puts `/v1` before the path of a route that clients ask for without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in UNPREFIXED:
            path = PREFIX + scope["path"]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
