"""Writes responses into sealed chunks: unshaped, or in the traffic shape that the profile requires (docs/traffic.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from cloister.trust.shape import BINARY_HTTP, FRAMES, BinaryHttpShaper, Shaper, TrafficShape

WRITE_TIMEOUT_S: Final = 60.0
"""Write timeout: a receiver that leaves a chunk unread for longer counts as disconnected."""
SETTLE_S: Final = 0.002
"""The last interval before a tick, for which the loop of a constant cadence blocks in `sleep`. The event loop rounds its timers
up to whole milliseconds from its last activity, so a token that arrived meanwhile would be visible in the time of the frame.
All streams wait for the same ticks, so this costs one sleep a tick, whatever their number.
"""
MAX_WAITING: Final = 64
"""Number of pieces that may be queued for a frame; beyond it `write` blocks, and with it the engine's reader."""

Emit = Callable[[bytes, bool], Awaitable[None]]
"""Seals one chunk and sends it: (plain text, whether it is the final one)."""


class ReplyWriter(Protocol):
    """Writes one response."""

    async def head(self, data: bytes) -> None:
        """Writes the head of the response, which is sent with the next write."""

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Writes one flush of the response; `last` marks the final one."""


@asynccontextmanager
async def open_reply(
    shape: TrafficShape | None, emit: Emit, write_timeout_s: float = WRITE_TIMEOUT_S, framing: str = FRAMES
) -> AsyncIterator[ReplyWriter]:
    """Begins a response to an opened request. Leaving the context waits until all of it is sent.

    An exception inside the context, or an incomplete response, ends it: a shaped one with an error frame and the padding that
    was due anyway, an unshaped one without its final chunk. The exception propagates. Cancellation stops immediately.

    Args:
        framing: frame format, one of `FRAMINGS`; unused without a shape.

    Raises:
        TimeoutError: a chunk was left unread for `write_timeout_s`.
    """
    reply = _PlainReply(emit, write_timeout_s) if shape is None else _ShapedReply(shape, emit, write_timeout_s, framing)
    try:
        yield reply
    except Exception:
        with suppress(Exception):  # report the first error
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
            async with asyncio.timeout(None if last else self._write_timeout_s):  # of a whole reply, each part has its own
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
            self._sender.result()  # why sending has stopped

    async def close(self) -> None:
        self._shaper.fail(self._loop.time())  # no effect if the response is complete
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
            self._taken.set()  # wakes a writer that waits for the queue; sending has stopped

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
