"""The outermost layer: every request gets a reply, internal errors included, and every reply is counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.calls import HttpCall, HttpCalls
from cloister.server.errors import error_body, error_headers
from cloister.server.logs import public_error
from cloister.types.errors import CloisterError

# Rate-limit headers: the remainders of an API key's limits.


def limit_headers(call: HttpCall) -> list[tuple[bytes, bytes]]:
    """Returns the headers with the remainders of a key's limits, with OpenAI's names and formats."""
    if call.account is None:
        return []
    headers = []
    for left in call.account.allowances(time.monotonic(), time.time()):
        values = {"limit": str(left.limit), "remaining": str(left.remaining), "reset": format_duration(left.reset_s)}
        headers += [(f"x-ratelimit-{what}-{left.kind}".encode(), value.encode()) for what, value in values.items()]
    return headers


def format_duration(duration_s: float) -> str:
    """Returns a duration in the format of OpenAI's headers, such as `6m0s`, `1s` or `120ms`."""
    if duration_s < 1:
        return f"{math.ceil(max(0.0, duration_s) * 1000)}ms"
    minutes, seconds = divmod(math.ceil(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "m"), (seconds, "s"))
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return "".join(f"{count}{unit}" for count, unit in parts[first:])


SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
STRICT_TRANSPORT = (b"strict-transport-security", b"max-age=31536000")

Header = tuple[bytes, bytes]


class ErrorMiddleware:
    """Converts exceptions to replies, and adds the headers of every reply.

    Args:
        calls: notified of the start and end of every request.
        paths: paths without parameters.
        has_tls: send HSTS (RFC 6797).
    """

    def __init__(self, app: ASGIApp, calls: HttpCalls, paths: frozenset[str] = frozenset(), *, has_tls: bool = False) -> None:
        self._app = app
        self._calls = calls
        self._paths = paths
        self._defaults = (*SECURITY_HEADERS, STRICT_TRANSPORT) if has_tls else SECURITY_HEADERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        call = self._calls.open(scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*_with_defaults(message.get("headers", ()), self._defaults), *_headers_of(call)]
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_last:  # before its end is sent: a client with a whole reply finds it in the metrics
                self._calls.close(call, self._route(scope), status)
            await send(message)
            if is_last:  # after the wait for a client that does not read, which bounds the unread replies of a key
                self._calls.leave(call)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            reply = public_error(error)
            if status is None:
                await send_error(send_with_headers, reply)
        finally:
            self._calls.close(call, self._route(scope), status)
            self._calls.leave(call)

    def _route(self, scope: Scope) -> str:
        """The template of the route, so that client-chosen paths never become labels."""
        path = getattr(scope.get("route"), "path", None)
        if isinstance(path, str):
            return path
        return str(scope["path"]) if scope["path"] in self._paths else "none"


async def send_error(send: Send, error: CloisterError, *, close: bool = False) -> None:
    """Sends an error as a complete reply.

    Args:
        close: the connection cannot be reused, because the rest of the request was not read.
    """
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    if close:
        headers["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _with_defaults(headers: Iterable[Header], defaults: Iterable[Header]) -> list[Header]:
    given = list(headers)
    names = {name.lower() for name, _ in given}
    return given + [header for header in defaults if header[0] not in names]


def _headers_of(call: HttpCall) -> list[Header]:
    return [(b"x-request-id", call.call_id.encode()), *limit_headers(call)]


# Error replies in each API's format, from any layer.


ErrorForm = Callable[[int, str], Any]
"""Makes the body of an error reply from its status and its message."""


class ErrorFormMiddleware:
    """Rewrites error replies of the form `errors.error_object` for APIs with another error format.

    Args:
        forms: by path prefix of the API, such as `/v1/messages`.
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


# Routes without the `/v1` prefix, for clients whose base URL lacks it.


PREFIX: Final = "/v1"
UNPREFIXED: Final = frozenset({"/chat/completions", "/completions", "/models", "/embeddings", "/responses", "/messages"})
"""Only these: all other routes are at their documented paths."""


class V1PrefixMiddleware:
    """Adds `/v1` to the path of a route that clients request without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in UNPREFIXED:
            path = PREFIX + scope["path"]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)
