"""The outermost layer: every request gets a reply, also one that met a mistake of ours; and every reply is counted."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.calls import HttpCall, HttpCalls
from cloister.server.errors import error_body, error_headers
from cloister.server.failures import told
from cloister.server.limits import limit_headers
from cloister.types.errors import CloisterError

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
STRICT_TRANSPORT = (b"strict-transport-security", b"max-age=31536000")

Header = tuple[bytes, bytes]


class Failures:
    """Turns errors that pass through it into replies, and adds the headers that every reply has.

    Args:
        calls: told of every request and of its end.
        paths: those that name a route by themselves.
        has_tls: browsers are told to come back over TLS only (RFC 6797).
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
            elif not message.get("more_body", False):
                # Before its end is sent: who has a whole reply finds it among the figures.
                self._calls.close(call, self._route(scope), status)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            reply = told(error)
            if status is None:
                await send_error(send_with_headers, reply)
        finally:
            self._calls.close(call, self._route(scope), status)

    def _route(self, scope: Scope) -> str:
        """The template of the route, so that no path that a client made up becomes a label."""
        path = getattr(scope.get("route"), "path", None)
        if isinstance(path, str):
            return path
        return str(scope["path"]) if scope["path"] in self._paths else "none"


async def send_error(send: Send, error: CloisterError, *, close: bool = False) -> None:
    """Sends an error as a whole reply.

    Args:
        close: the connection cannot be used again, since the rest of the request was not read.
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
