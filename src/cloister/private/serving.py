"""Shared parts of the sealed programs' ASGI applications: lifespan, health, public files, errors outside of routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from cloister.private.http_io import Outgoing
from cloister.private.problems import ProblemError, problem_of
from cloister.private.upstream import Upstream
from cloister.trust.transparency.tiles import read_resource
from cloister.types.errors import CloisterError

_TITLES: Final = {404: "There is nothing at this path.", 405: "This path does not take the method."}


class Lifespan:
    """Background tasks and clients of an application, closed with it.

    Args:
        upstream: closed at shutdown; None if there is none.
        background: started with the application, cancelled at shutdown.
    """

    def __init__(self, upstream: Upstream | None, *background: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._upstream = upstream
        self._background = background

    @asynccontextmanager
    async def __call__(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(start()) for start in self._background]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            if self._upstream is not None:
                await self._upstream.close()


class Post:
    """Passes only POST requests to an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._app(scope, receive, send)
        else:
            await Outgoing(send).refuse(ProblemError(405, "This path takes POST.", fields=((b"allow", b"POST"),)))


class HealthEndpoint:
    """Reports that the program runs. It depends on no other service, so there is nothing else to report."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b'{"status":"ok"}', media_type="application/json")(scope, receive, send)


def handlers() -> dict[Any, ExceptionHandler]:
    """Returns the error handlers for unknown paths and methods."""
    return {HTTPException: _refuse}


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ProblemError(error.status_code, _TITLES.get(error.status_code, "The request cannot be answered."))
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    return Response(problem.body, problem.status, headers)


MAX_AGE_S: Final = 60


class LogFiles:
    """Serves the log's files (C2SP tlog-tiles), and no other file in its directory.

    A partial tile that was replaced is cut from its successor: a client may still use the previous checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def read() -> bytes | None:
            return None if found is None else found[0]

        path = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/")
        found = await asyncio.to_thread(read_resource, self._directory, path)
        await File(read, found[1] if found else "text/plain")(scope, receive, send)


class File:
    """Serves the bytes that `read` returns; 404 for None."""

    def __init__(self, read: Callable[[], Awaitable[bytes | None]], media_type: str) -> None:
        self._read = read
        self._media_type = media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            await Outgoing(send).refuse(ProblemError(405, "This path takes GET.", fields=((b"allow", b"GET"),)))
            return
        try:
            content = await self._read()
        except CloisterError as error:
            await Outgoing(send).refuse(problem_of(error))
            return
        if content is None:
            await Outgoing(send).refuse(ProblemError(404, "There is no such file, or not yet."))
            return
        headers = {"cache-control": f"max-age={MAX_AGE_S}"}
        await Response(content, media_type=self._media_type, headers=headers)(scope, receive, send)
