"""The outermost layer: every request gets a reply, also one that met a mistake of ours; and every reply is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.errors import error_body, error_headers
from cloister.server.failures import told
from cloister.types.errors import CloisterError

ReplyCounter = Callable[[str, int], None]
"""Called with (route template, status)."""

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


class Failures:
    """Turns errors that pass through it into replies, and adds the headers that every reply has.

    Args:
        count_reply: told of every reply.
    """

    def __init__(self, app: ASGIApp, count_reply: ReplyCounter) -> None:
        self._app = app
        self._count_reply = count_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        is_counted = False

        def count() -> None:
            nonlocal is_counted
            if status is not None and not is_counted:
                is_counted = True
                self._count_reply(_route(scope), status)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _with_defaults(message.get("headers", ()))
            elif not message.get("more_body", False):
                count()  # before its end is sent: who has a whole reply finds it among the figures
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            reply = told(error)
            if status is None:
                await send_error(send_with_headers, reply)
        finally:
            count()


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


def _with_defaults(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = list(headers)
    names = {name.lower() for name, _ in given}
    return given + [header for header in SECURITY_HEADERS if header[0] not in names]


def _route(scope: Scope) -> str:
    """The template of the route, so that no path that a client made up becomes a label."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "none"
