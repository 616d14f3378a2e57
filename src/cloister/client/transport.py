"""httpx transports that seal every request to a node that they draw, so that SDKs work unchanged.

Both perform the operations of `make_sealed_call` and of `Session`; all decisions are made there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, TypeVar

import anyio
import httpx
import sniffio

from cloister.client.attempts import Attempts, to_request, to_response
from cloister.client.protocol import DEADLINE_S, Ask, FetchSteps, Reply, too_long, unreachable
from cloister.client.restocking import AsyncRestocker, Restocker
from cloister.client.sealed_call import AnswerReader, Operation, PostRequest, Prepare, Receive, make_sealed_call
from cloister.client.session import PreparedRequest, Session
from cloister.types.errors import CloisterError

T = TypeVar("T")
PADDING_TIMEOUT_S: Final = 600.0
"""Timeout for padding: slightly more than the longest answer."""


class SealedTransport(httpx.BaseTransport):
    """Seals requests: `openai.OpenAI(http_client=httpx.Client(transport=SealedTransport(session)))`.

    Host, port and scheme of a request's URL are ignored: the session knows the relay, and a node is drawn for each request. An
    API key in its headers is dropped; the session's own is sent to the issuer only. Thread-safe.

    Args:
        session: relay, trust, policy and tokens; may be shared.
        carrier: HTTP transport to relay and issuer; None creates a pooled one.

    `handle_request` raises, before anything was sent: `EpochRefusedError`, `EvidenceRefusedError`, `NoTokensError`,
    `RelayUnreachableError`; after every draw failed: `NoAnswerError`; if another draw would not help: `FinalRefusalError`; for
    an answer that was cut off: `httpx.RemoteProtocolError`; for one that timed out: `httpx.ReadTimeout`.
    """

    def __init__(self, session: Session, carrier: httpx.BaseTransport | None = None) -> None:
        self._session = session
        self._carrier = carrier or httpx.HTTPTransport()
        self._padding = PaddingReader()
        self._lock = threading.Lock()
        self._restocker = Restocker(self._restock)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        Attempts.check_first(request)
        operations = make_sealed_call(self._session, request, request.read())
        reply = _OpenReply(self._carrier)
        try:
            operation = next(operations)
            while True:
                try:
                    outcome = self.prepare() if isinstance(operation, Prepare) else reply.perform(operation)
                except Exception as error:  # the generator interprets it
                    operation = operations.throw(error)
                else:
                    operation = operations.send(outcome)
        except StopIteration as result:
            answered = result.value
        except BaseException:
            reply.close()
            raise
        stream = AnswerStream(reply, answered.reader, self._padding)
        return to_response(answered.reader.answer, stream, answered.ready, answered.attempts)

    def prepare(self) -> PreparedRequest:
        """Fetches and verifies everything that the next request needs, and draws its node; for programs that display it."""
        with self._lock:
            ready = self._run(self._session.prepare())
            self._restocker.plan(self._session.restock_in_s)
            return ready

    def close(self) -> None:
        self._restocker.close()
        self._padding.wait()
        self._carrier.close()

    def _restock(self) -> None:
        with suppress(CloisterError):
            self._run(self._session.restock(), self._lock)

    def _run(self, step: FetchSteps[T], lock: AbstractContextManager[object] | None = None) -> T:
        """Performs a step; holds `lock` while it computes, not while it waits."""
        lock = lock or nullcontext()
        try:
            with lock:
                ask = next(step)
            while True:
                reply = self._ask(ask)
                with lock:
                    ask = step.send(reply)
        except StopIteration as result:
            done: T = result.value
            return done

    def _ask(self, ask: Ask) -> Reply:
        give_up_at, reply = time.monotonic() + DEADLINE_S, _OpenReply(self._carrier)
        try:
            response = reply.open(to_request(ask.url, ask.body, None, ask.method, ask.headers))
            try:
                body = b""
                for data in reply.chunks:
                    body += data
                    if len(body) > ask.most_bytes:
                        raise too_long(ask)
                    if time.monotonic() > give_up_at:
                        raise httpx.ReadTimeout("the whole answer took too long")
            finally:
                reply.close()
        except httpx.TransportError as error:
            raise unreachable(ask, error) from None
        return Reply(response.status_code, response.headers.get("content-type", ""), body)


class AsyncSealedTransport(httpx.AsyncBaseTransport):
    """`SealedTransport` for `httpx.AsyncClient`, on asyncio and trio; arguments and errors are the same."""

    def __init__(self, session: Session, carrier: httpx.AsyncBaseTransport | None = None) -> None:
        self._session = session
        self._carrier = carrier or httpx.AsyncHTTPTransport()
        self._padding = AsyncPaddingReader()
        self._lock = anyio.Lock()
        self._restocker = AsyncRestocker(self._restock)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        Attempts.check_first(request)
        operations = make_sealed_call(self._session, request, await request.aread())
        reply = _AsyncOpenReply(self._carrier)
        try:
            operation = next(operations)
            while True:
                try:
                    outcome = await (self.prepare() if isinstance(operation, Prepare) else reply.perform(operation))
                except Exception as error:  # the generator interprets it
                    operation = operations.throw(error)
                else:
                    operation = operations.send(outcome)
        except StopIteration as result:
            answered = result.value
        except BaseException:
            await reply.aclose()
            raise
        stream = AsyncAnswerStream(reply, answered.reader, self._padding)
        return to_response(answered.reader.answer, stream, answered.ready, answered.attempts)

    async def prepare(self) -> PreparedRequest:
        """See `SealedTransport.prepare`."""
        async with self._lock:
            ready = await self._run(self._session.prepare())
            self._restocker.plan(self._session.restock_in_s)
            return ready

    async def aclose(self) -> None:
        await self._restocker.close()
        await self._padding.wait()
        await self._carrier.aclose()

    async def _restock(self) -> None:
        with suppress(CloisterError):
            await self._run(self._session.restock())

    async def _run(self, step: FetchSteps[T]) -> T:
        try:
            ask = next(step)
            while True:
                ask = step.send(await self._ask(ask))
        except StopIteration as result:
            done: T = result.value
            return done

    async def _ask(self, ask: Ask) -> Reply:
        reply = _AsyncOpenReply(self._carrier)
        try:
            with anyio.fail_after(DEADLINE_S):
                response = await reply.open(to_request(ask.url, ask.body, None, ask.method, ask.headers))
                try:
                    body = b""
                    async for data in reply.chunks:
                        body += data
                        if len(body) > ask.most_bytes:
                            raise too_long(ask)
                finally:
                    await reply.aclose()
        except (httpx.TransportError, TimeoutError) as error:
            raise unreachable(ask, error) from None
        return Reply(response.status_code, response.headers.get("content-type", ""), body)


class _OpenReply:
    """The open response of a request."""

    def __init__(self, carrier: httpx.BaseTransport) -> None:
        self._carrier = carrier
        self._response: httpx.Response | None = None
        self.chunks: Iterator[bytes] = iter(())

    def open(self, request: httpx.Request) -> httpx.Response:
        self._response = self._carrier.handle_request(request)
        assert isinstance(self._response.stream, httpx.SyncByteStream)
        self.chunks = iter(self._response.stream)
        return self._response

    def perform(self, operation: Operation) -> object:
        if isinstance(operation, PostRequest):
            return self.open(operation.request)
        if isinstance(operation, Receive):
            return next(self.chunks, None)
        self.close()
        return None

    def close(self) -> None:
        if self._response is not None:
            self._response.close()


class _AsyncOpenReply:
    def __init__(self, carrier: httpx.AsyncBaseTransport) -> None:
        self._carrier = carrier
        self._response: httpx.Response | None = None
        self.chunks: AsyncIterator[bytes]

    async def open(self, request: httpx.Request) -> httpx.Response:
        self._response = await self._carrier.handle_async_request(request)
        assert isinstance(self._response.stream, httpx.AsyncByteStream)
        self.chunks = aiter(self._response.stream)
        return self._response

    async def perform(self, operation: Operation) -> object:
        if isinstance(operation, PostRequest):
            return await self.open(operation.request)
        if isinstance(operation, Receive):
            return await anext(self.chunks, None)
        await self.aclose()
        return None

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):  # cancellation must still close the connection
            if self._response is not None:
                await self._response.aclose()


class AnswerStream(httpx.SyncByteStream):
    """Streams the content of an answer."""

    def __init__(self, reply: _OpenReply, reader: AnswerReader, padding: PaddingReader) -> None:
        self._reply, self._reader, self._padding = reply, reader, padding

    def __iter__(self) -> Iterator[bytes]:
        if first := self._reader.take_first():
            yield first
        while not self._reader.is_over:
            if content := self._reader.take(next(self._reply.chunks, None)):
                yield content

    def close(self) -> None:
        if self._reader.has_padding:
            self._reader.has_padding = False
            self._padding.read(self._reply.chunks, self._reply.close)
        else:
            self._reply.close()


class AsyncAnswerStream(httpx.AsyncByteStream):
    """Streams the content of an answer."""

    def __init__(self, reply: _AsyncOpenReply, reader: AnswerReader, padding: AsyncPaddingReader) -> None:
        self._reply, self._reader, self._padding = reply, reader, padding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if first := self._reader.take_first():
            yield first
        while not self._reader.is_over:
            if content := self._reader.take(await anext(self._reply.chunks, None)):
                yield content

    async def aclose(self) -> None:
        if self._reader.has_padding:
            self._reader.has_padding = False
            await self._padding.read(self._reply.chunks, self._reply.aclose)
        else:
            await self._reply.aclose()


# Reads the padding after a complete answer to its end in the background.
# Disconnecting as soon as the answer is complete would reveal to the relay the length that the padding hides
# (docs/traffic.md). So the reader finishes immediately, and the rest is read in the background and discarded.
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
