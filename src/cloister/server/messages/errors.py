"""Errors as clients of the Messages API read them: {"type": "error", "error": {type, message}}."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_object(status: int, message: str) -> dict[str, Any]:
    """Returns the body of an error reply."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageErrors:
    """Rewrites error replies of this API's routes, whichever layer they come from."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_ours(scope["path"]):
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
                    rewritten = _rewrite(start["status"], bytes(body))
                    await send({**start, "headers": _with_length(start["headers"], len(rewritten))})
                    await send({"type": "http.response.body", "body": rewritten})

        await self._app(scope, receive, rewrite)


def _is_ours(path: str) -> bool:
    return path == PREFIX or path.startswith(PREFIX + "/")


def _rewrite(status: int, body: bytes) -> bytes:
    error = msgspec.json.decode(body)["error"]
    return msgspec.json.encode(error_object(status, error["message"]))


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    others = [header for header in headers if header[0].lower() != b"content-length"]
    return [*others, (b"content-length", str(length).encode())]
