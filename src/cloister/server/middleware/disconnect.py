"""Cancels the request of a client that disconnects, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

WRITE_TIMEOUT_S: Final = 60.0
"""How long a client may leave a reply unread before it counts as gone."""


class CancelOnDisconnect:
    """Runs a route beside a watch on the connection. Expects the whole body in the first message (see `BodyReader`).

    The route's task is cancelled, which closes the engine's iterator: the blocks are free at the next step.
    """

    def __init__(self, app: ASGIApp, write_timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._app = app
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body: Message | None = await receive()
        gone = asyncio.create_task(_wait_until_gone(receive))
        stuck = asyncio.Event()

        async def receive_body() -> Message:
            nonlocal body
            if body is None:
                await asyncio.wait([gone])
                return {"type": "http.disconnect"}
            message, body = body, None
            return message

        def give_up() -> None:
            stuck.set()
            work.cancel()

        patience, now_s = Patience(self._write_timeout_s, give_up), asyncio.get_running_loop().time

        async def send_in_time(message: Message) -> None:
            patience.since_s = now_s()
            try:
                await send(message)
            except OSError:
                stuck.set()
                raise asyncio.CancelledError from None
            finally:
                patience.since_s = None

        work = asyncio.ensure_future(self._app(scope, receive_body, send_in_time))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            patience.close()
            finished = work.done()
            await _end(gone)
            await _end(work)
        if finished and not stuck.is_set():
            work.result()  # passes its error on


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[None]) -> None:
    """Cancels a task and waits until it is over; what it raised stays in it."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not log it


class Patience:
    """A bound for each of many waits, one after the other.

    Args:
        limit_s: how long one wait may last.
        give_up: called once when one has lasted that long.

    Attributes:
        since_s: when the present wait began, on the loop's clock; None between waits. Set by whoever waits, for every token.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
        self._loop = asyncio.get_running_loop()
        self.since_s: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    def close(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self.since_s is None else self.since_s) + self._limit_s
        if due_s <= now_s:
            self._give_up()
        else:
            self._timer = self._loop.call_at(due_s, self._look)
