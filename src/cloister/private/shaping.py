"""Answers on their way into sealed chunks: as they come, or in the shape that the profile asks for (docs/traffic.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from cloister.trust.shape import BINARY_HTTP, FRAMES, BinaryHttpShaper, Shaper, TrafficShape

WRITE_TIMEOUT_S: Final = 60.0
"""How long whoever is next on the way may leave a chunk unread before it counts as gone."""
SETTLE_S: Final = 0.002
"""The last stretch before a tick, which the loop of a constant cadence sleeps through. A loop's own timers are rounded up to
whole milliseconds from when it last did something, so a token that came meanwhile would show in when the frame leaves. All
streams wait for the same ticks, so this is lost once a tick, however many there are."""
MAX_WAITING: Final = 64
"""Pieces that may wait for a frame; then `write` waits, and so does the engine's reader."""

Emit = Callable[[bytes, bool], Awaitable[None]]
"""Seals one chunk and sends it: (plain text, whether it is the final one)."""


class ReplyWriter(Protocol):
    """An answer that is being written."""

    async def head(self, data: bytes) -> None:
        """Takes the head of the answer, which leaves together with what is written next."""

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Takes one flush of the answer; `last` says that it is complete."""


@asynccontextmanager
async def open_reply(
    shape: TrafficShape | None, emit: Emit, write_timeout_s: float = WRITE_TIMEOUT_S, framing: str = FRAMES
) -> AsyncIterator[ReplyWriter]:
    """Begins an answer when its request has been opened. Leaving the context waits until all of it is sent.

    An exception inside the context, and an answer that was not completed, end it: shaped, with a frame that says so and the
    padding that was due anyway; not shaped, without the final chunk. The exception goes on to whoever called. Cancelling stops
    at once.

    Args:
        framing: how frames are written, of `FRAMINGS`; without a shape there are none.

    Raises:
        TimeoutError: a chunk was left unread for `write_timeout_s`.
    """
    reply = _PlainReply(emit, write_timeout_s) if shape is None else _ShapedReply(shape, emit, write_timeout_s, framing)
    try:
        yield reply
    except Exception:
        with suppress(Exception):  # the first error is the one to tell of
            await reply.close()
        raise
    except BaseException:
        await reply.stop()
        raise
    await reply.close()


class _PlainReply:
    def __init__(self, emit: Emit, write_timeout_s: float) -> None:
        self._emit = emit
        self._write_timeout_s = write_timeout_s
        self._head = b""

    async def head(self, data: bytes) -> None:
        self._head += data

    async def write(self, data: bytes, *, last: bool = False) -> None:
        data, self._head = self._head + data, b""
        if data or last:
            async with asyncio.timeout(self._write_timeout_s):
                await self._emit(data, last)

    async def close(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class _ShapedReply:
    def __init__(self, shape: TrafficShape, emit: Emit, write_timeout_s: float, framing: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._shape = shape
        self._shaper = (BinaryHttpShaper if framing == BINARY_HTTP else Shaper)(shape, self._loop.time())
        self._emit = emit
        self._write_timeout_s = write_timeout_s
        self._written = asyncio.Event()
        self._taken = asyncio.Event()
        self._sender = asyncio.create_task(self._send_frames())

    async def head(self, data: bytes) -> None:
        self._shaper.head(data)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        self._shaper.write(data, self._loop.time(), last=last)
        self._written.set()
        while self._shaper.num_waiting > MAX_WAITING and not self._sender.done():
            self._taken.clear()
            await self._taken.wait()
        if self._sender.done():
            self._sender.result()  # why nothing is sent any more

    async def close(self) -> None:
        self._shaper.fail(self._loop.time())  # does nothing where the answer is complete
        self._written.set()
        await self._sender

    async def stop(self) -> None:
        self._sender.cancel()
        await asyncio.wait([self._sender])

    async def _send_frames(self) -> None:
        try:
            while not self._shaper.is_over:
                await self._send_next()
        finally:
            self._taken.set()  # whoever waits for room sees that nothing is sent any more

    async def _wait_until(self, due_s: float) -> None:
        if self._shape.constant:
            await asyncio.sleep(due_s - SETTLE_S - self._loop.time())
            time.sleep(max(0.0, due_s - self._loop.time()))
        else:
            await asyncio.sleep(due_s - self._loop.time())

    async def _send_next(self) -> None:
        if (due_s := self._shaper.due_s) is None:
            self._written.clear()
            await self._written.wait()
            return
        await self._wait_until(due_s)
        if (frame := self._shaper.take(self._loop.time())) is None:
            return
        self._taken.set()
        async with asyncio.timeout(self._write_timeout_s):
            await self._emit(frame.data, frame.is_last)
