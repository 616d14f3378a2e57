"""Files that are the same for whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloister.privacy.transparency.tiles import read_resource
from cloister.sealed.exchange import Outgoing
from cloister.sealed.problems import ProblemError, problem_of
from cloister.types.errors import CloisterError

MAX_AGE_S: Final = 60


class LogFiles:
    """Answers GET below the log's URL with the log's own files (C2SP tlog-tiles), and with nothing else in its directory.

    A partial tile that is gone is cut from the one that it became: a client may come with the checkpoint of a moment ago.
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
    """Answers GET with the bytes that `read` returns; 404 for None."""

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
