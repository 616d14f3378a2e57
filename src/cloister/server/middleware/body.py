"""Reads the request body before its route runs, with limits on size and time; cancels the request if the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.errors import BodyTimeoutError, MediaTypeError, OriginError, OverloadedError
from cloister.server.load_shedding import (
    BODY_CHARGE,
    BodyBudget,
    BodyCharge,
    BodyPace,
    ShedError,
    client_network,
    find_body_ceiling,
    find_owner,
    receive_piece,
)
from cloister.server.middleware.cors import is_allowed
from cloister.server.middleware.failures import send_error
from cloister.server.reading_queue import NUM_BODY_BYTES
from cloister.types.errors import CloisterError, RequestTooLargeError


class _GoneError(Exception):
    """The client closed the connection before its body was complete."""


class BodyMiddleware:
    """Passes requests with complete bodies to routes. A refused body is not read further: the ASGI server discards it, or
    `LingeringMiddleware` where the connection is closed.

    Args:
        limit_bytes: maximum body size.
        budget: memory budget of all request bodies, each charged until its request has ended.
        timeout_s: timeout for receiving a body.
        paths: paths that read a body. For other paths (some are unauthenticated) its media type is not checked and nothing of
            it is kept but its size (`num_unread_bytes` of the request's state); the router reports errors.
        forms: paths among them whose body is a form with a file.
        origins: origins of pages that may send a form or no body, in addition to the server's own.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit_bytes: int,
        timeout_s: float,
        paths: Collection[str],
        budget: BodyBudget | None = None,
        forms: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._paths = frozenset(paths)
        self._forms = frozenset(forms)
        self._origins = frozenset(origins)
        self._budget = budget or BodyBudget(find_body_ceiling(limit_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        charge = self._budget.open(client_network(scope), find_owner(scope.get("state", {}).get("admission")))
        try:
            await self._serve(scope, receive, send, charge)
        finally:
            charge.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, charge: BodyCharge) -> None:
        try:
            body: bytes | None = await self._read(scope, receive, charge)
        except _GoneError:
            return
        except CloisterError as error:
            await send_error(send, error, close=isinstance(error, BodyTimeoutError | OverloadedError))
            return

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message: Message = {"type": "http.request", "body": body, "more_body": False}
            body = None
            return message

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive, charge: BodyCharge) -> bytes:
        is_wanted = scope["method"] == "POST" and scope["path"] in self._paths
        is_form = scope["path"] in self._forms
        if scope["method"] == "POST" and (is_form or not is_wanted):  # a browser sends it without a preflight
            _check_origin(scope, self._origins)
        if is_wanted:
            _check_media_type(scope, is_form=is_form)
        if _declared_bytes(scope) > self._limit_bytes:
            raise self._too_large()
        try:
            body, num_bytes = await self._collect(receive, charge, keeps=is_wanted)
            state = scope.setdefault("state", {})
            state["num_unread_bytes"], state[NUM_BODY_BYTES] = num_bytes - len(body), len(body)
            state[BODY_CHARGE] = charge
            return body
        except TimeoutError:
            raise BodyTimeoutError(
                f"The body came too slowly, or did not arrive within {self._timeout_s:g} s; send the request again, in one go."
            ) from None
        except ShedError:
            raise OverloadedError("There is no memory for the request now; try again in a moment.") from None

    async def _collect(self, receive: Receive, charge: BodyCharge, *, keeps: bool) -> tuple[bytes, int]:
        """Returns the body, empty unless it is kept, and its size."""
        body, num_bytes, more = bytearray(), 0, True
        pace = BodyPace(asyncio.get_running_loop().time(), self._timeout_s)
        while more:
            message = await receive_piece(receive, charge, pace)
            if message["type"] == "http.disconnect":
                raise _GoneError
            piece = message.get("body", b"")
            num_bytes += len(piece)
            more = message.get("more_body", False)
            if num_bytes > self._limit_bytes:
                raise self._too_large()
            if keeps:
                body += piece
                charge.is_whole = not more
                charge.add(len(piece))
                if charge.is_shed:
                    raise ShedError
        return bytes(body), num_bytes

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"The body is larger than this server's limit of {self._limit_bytes // 1024} KiB.")


def _check_media_type(scope: Scope, *, is_form: bool) -> None:
    # A browser may send text/plain or a form to any address without a preflight, but not JSON.
    media_type = _header(scope, b"content-type").partition(";")[0].strip()
    if is_form:
        if media_type != "multipart/form-data":
            raise MediaTypeError("The body must be a form with a file; send the header `Content-Type: multipart/form-data`.")
    elif media_type != "application/json" and not _is_curl(scope, media_type):
        raise MediaTypeError("The body must be JSON; send the header `Content-Type: application/json`.")
    if _header(scope, b"content-encoding") not in ("", "identity"):
        raise MediaTypeError("The body must not be compressed; leave out the header `Content-Encoding`.")


def _check_origin(scope: Scope, origins: Collection[str]) -> None:
    origin = _header(scope, b"origin")
    if origin and origin.partition("://")[2] != _header(scope, b"host") and not is_allowed(origin, origins):
        raise OriginError


def _is_curl(scope: Scope, media_type: str) -> bool:
    """Whether a body is JSON with a form's media type, as from `curl -d` in Ollama's documentation.

    A browser that sends such a form states its origin (Fetch, 3.2 and Fetch Metadata, 2.3).
    """
    is_browser = any(_header(scope, name) for name in (b"origin", b"sec-fetch-site", b"referer"))
    return scope["path"].startswith("/api/") and media_type == "application/x-www-form-urlencoded" and not is_browser


def _declared_bytes(scope: Scope) -> int:
    value = _header(scope, b"content-length")
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else 0


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1").strip().lower() for name, value in scope["headers"] if name == wanted), "")


class DisconnectMiddleware:
    """Runs a route while watching the connection. Expects the whole body in the first message (see `BodyMiddleware`).

    `connection.Connection` disconnects a client that leaves a reply unread. On a disconnect this cancels the task of the route,
    which closes the engine's iterator: the blocks become free at the next step.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body: Message | None = await receive()
        gone = asyncio.create_task(_wait_until_gone(receive))
        is_broken = False

        async def receive_body() -> Message:
            nonlocal body
            if body is None:
                await asyncio.wait([gone])
                return {"type": "http.disconnect"}
            message, body = body, None
            return message

        async def send_unless_broken(message: Message) -> None:
            nonlocal is_broken
            try:
                await send(message)
            except OSError:
                is_broken = True
                raise asyncio.CancelledError from None

        work = asyncio.ensure_future(self._app(scope, receive_body, send_unless_broken))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = work.done()
            await _end(gone)
            await _end(work)
        if finished and not is_broken:
            work.result()  # propagates its error


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[None]) -> None:
    """Cancels a task and waits until it ends; its exception is not raised."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
