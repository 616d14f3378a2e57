"""Reads the padding after a complete answer to its end in the background.

Disconnecting as soon as the answer is complete would reveal to the relay the length that the padding hides (docs/traffic.md).
So the reader finishes immediately, and the rest is read in the background and discarded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Final

import anyio
import httpx
import sniffio

PADDING_TIMEOUT_S: Final = 600.0
"""Timeout for padding: slightly more than the longest answer."""


class PaddingReader:
    """Reads padding in separate threads. The interpreter waits for them when it ends, and so does `wait`."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()

    def read(self, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
        """Reads `chunks` to their end, then calls `close`. Returns at once."""
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=_read, args=(chunks, close), name="cloister padding")
        self._threads.add(thread)
        thread.start()

    def wait(self) -> None:
        """Waits until all padding has been read."""
        for thread in self._threads:
            thread.join(PADDING_TIMEOUT_S)


def _read(chunks: Iterator[bytes], close: Callable[[], None]) -> None:
    timer = threading.Timer(PADDING_TIMEOUT_S, close)
    timer.daemon = True
    timer.start()
    with suppress(httpx.TransportError, httpx.StreamError):  # the answer is already complete, so errors do not matter
        for _ in chunks:
            pass
    timer.cancel()
    close()


class AsyncPaddingReader:
    """Like `PaddingReader`, in tasks. Without asyncio, closing the answer reads the padding."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, chunks: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        """Reads `chunks` to their end, then calls `close`."""
        if sniffio.current_async_library() != "asyncio":
            await _read_async(chunks, close)
            return
        task = asyncio.create_task(_read_async(chunks, close))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Waits until all padding has been read."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _read_async(chunks: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
    with suppress(httpx.TransportError, httpx.StreamError), anyio.move_on_after(PADDING_TIMEOUT_S):
        async for _ in chunks:
            pass
    with anyio.CancelScope(shield=True):
        await close()
