"""Tells a client which fields of its request had no effect."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.ignored import IGNORED_HEADER, IgnoredFields, noting


class TellIgnored:
    """Puts the header `cloister-ignored-fields` on replies to requests of which something was ignored.

    Args:
        strict: nothing is ignored; a request with an unknown field is refused.
    """

    def __init__(self, app: ASGIApp, *, strict: bool) -> None:
        self._app = app
        self._is_strict = strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = IgnoredFields(self._is_strict)

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start" and fields.paths:
                header = (IGNORED_HEADER.encode(), fields.header().encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        with noting(fields):
            await self._app(scope, receive, send_with_fields)
