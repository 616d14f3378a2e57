"""Error replies in the form that an API's clients read, whichever layer they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ErrorForm = Callable[[int, str], Any]
"""Makes the body of an error reply from its status and its message."""


class ErrorForms:
    """Rewrites error replies of the form `errors.error_object` where an API has a form of its own.

    Args:
        forms: by the folder that the API's paths stand in, such as `/v1/messages`.
    """

    def __init__(self, app: ASGIApp, forms: Mapping[str, ErrorForm]) -> None:
        self._app = app
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = self._find(scope["path"]) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def rewrite(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    told = msgspec.json.decode(bytes(body))["error"]["message"]
                    rewritten = msgspec.json.encode(form(start["status"], told))
                    await send({**start, "headers": _with_length(start["headers"], len(rewritten))})
                    await send({"type": "http.response.body", "body": rewritten})

        await self._app(scope, receive, rewrite)

    def _find(self, path: str) -> ErrorForm | None:
        return next((form for folder, form in self._forms.items() if f"{path}/".startswith(f"{folder}/")), None)


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    others = [header for header in headers if header[0].lower() != b"content-length"]
    return [*others, (b"content-length", str(length).encode())]
