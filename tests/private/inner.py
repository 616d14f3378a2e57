"""Small applications behind a node: one whose every answer a test can hold back, and one that counts."""

from __future__ import annotations

import asyncio
import threading

from starlette.types import Message, Receive, Scope, Send

ANSWER = b"the answer is sealed as well"


class Inner:
    """Answers by path: `/v1/echo`, `/v1/stream` piece by piece, `/v1/fail` and `/v1/break` with a mistake.

    Attributes:
        seen: (method, path, query, headers, body) of each request.
        go: a piece of a stream leaves for each release.
        cancelled: set when a request was cancelled.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.clients: list[object] = []
        self.go = threading.Semaphore(0)
        self.started = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message: Message = await receive()
        assert not message["more_body"]
        self.seen.append((scope["method"], scope["path"], scope["query_string"], list(scope["headers"]), message["body"]))
        self.clients.append(scope["client"])
        try:
            await getattr(self, f"_{scope['path'].rpartition('/')[2]}")(message["body"], send)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _echo(self, body: bytes, send: Send) -> None:
        await _start(send, 200, (b"x-inner", b"yes"), (b"connection", b"keep-alive"))
        await send({"type": "http.response.body", "body": ANSWER + body})

    async def _teapot(self, body: bytes, send: Send) -> None:
        await _start(send, 418)
        await send({"type": "http.response.body", "body": ANSWER})

    async def _stream(self, body: bytes, send: Send) -> None:
        await _start(send, 200)
        for number in range(3):
            await self._wait()
            await send({"type": "http.response.body", "body": b"piece %d;" % number, "more_body": True})
        await self._wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, body: bytes, send: Send) -> None:
        raise RuntimeError(f"this text has content: {body!r}")

    async def _break(self, body: bytes, send: Send) -> None:
        await _start(send, 200)
        await send({"type": "http.response.body", "body": b"a beginning", "more_body": True})
        raise RuntimeError(f"this text has content: {body!r}")

    async def _leave(self, body: bytes, send: Send) -> None:
        await _start(send, 200)
        await send({"type": "http.response.body", "body": b"a beginning", "more_body": True})

    async def _health(self, body: bytes, send: Send) -> None:
        await _start(send, 200)
        await send({"type": "http.response.body", "body": b"well"})

    async def _wait(self) -> None:
        self.started.set()
        while not self.go.acquire(blocking=False):
            await asyncio.sleep(0.002)


async def _start(send: Send, status: int, *fields: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain"), *fields]})


class CountingApp:
    """Answers everything alike.

    Attributes:
        budgets: the output budget of each request that was answered.
    """

    def __init__(self) -> None:
        self.budgets: list[int | None] = []

    @property
    def num_answered(self) -> int:
        return len(self.budgets)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.budgets.append(scope["state"]["output_budget"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})
