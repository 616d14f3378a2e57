"""`AsyncSealedTransport`: `SealedTransport` for `httpx.AsyncClient`, on asyncio and trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TypeVar

import anyio
import httpx

from cloister.client.answer import Answer, BrokenAnswerError
from cloister.client.attempts import (
    CUT_OFF,
    Attempts,
    is_answer,
    read_timeouts,
    refuse_reply,
    to_fields,
    to_request,
    to_response,
)
from cloister.client.envelope import strip_request
from cloister.client.errors import FailedTryError, SealedError
from cloister.client.node_selection import MAX_DRAWS
from cloister.client.padding import AsyncPaddingReader
from cloister.client.protocol import DEADLINE_S, Ask, Reply, Step, too_long, unreachable
from cloister.client.restocking import AsyncRestocker
from cloister.client.session import PreparedRequest, Session
from cloister.privacy.sealing import HttpRequest
from cloister.types.errors import CloisterError

T = TypeVar("T")


class AsyncSealedTransport(httpx.AsyncBaseTransport):
    """See `SealedTransport`; arguments and errors are the same."""

    def __init__(self, session: Session, carrier: httpx.AsyncBaseTransport | None = None) -> None:
        self._session = session
        self._carrier = carrier or httpx.AsyncHTTPTransport()
        self._padding = AsyncPaddingReader()
        self._lock = anyio.Lock()
        self._restocker = AsyncRestocker(self._restock)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        Attempts.check_first(request)
        content = await request.aread()
        attempts = Attempts(request)
        while len(attempts) < MAX_DRAWS:
            try:
                ready = await self.prepare()
                plain = strip_request(request.method, request.url.raw_path, to_fields(request), content, self._session.now())
                return await self._try_once(request, plain, ready, attempts)
            except FailedTryError as error:
                attempts.fail(error)
                self._session.doubt()
            except SealedError as error:
                if (ended := attempts.conclude(error)) is error:
                    raise
                raise ended from error
        raise attempts.give_up()

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

    async def _try_once(
        self, request: httpx.Request, plain: HttpRequest, ready: PreparedRequest, attempts: Attempts
    ) -> httpx.Response:
        attempts.draw(ready)
        envelope = ready.seal(plain, self._session.now())
        posted = to_request(self._session.relay, envelope.sealed, read_timeouts(request))
        attempts.num_sent += 1
        try:
            reply = await self._carrier.handle_async_request(posted)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            attempts.num_sent -= 1
            self._session.give_back(ready)
            raise unreachable(Ask("the relay", self._session.relay), error) from None
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise FailedTryError(f"the relay broke off ({type(error).__name__})") from None
        stream = _Opened(reply, envelope.answer, self._padding)
        try:
            if not is_answer(reply):
                refuse_reply(reply.status_code, await stream.read_refusal())
            await stream.read_head()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await reply.aclose()
            raise
        return to_response(envelope.answer, stream, ready, attempts)

    async def _restock(self) -> None:
        with suppress(CloisterError):
            await self._run(self._session.restock())

    async def _run(self, step: Step[T]) -> T:
        try:
            ask = next(step)
            while True:
                ask = step.send(await self._ask(ask))
        except StopIteration as result:
            done: T = result.value
            return done

    async def _ask(self, ask: Ask) -> Reply:
        try:
            with anyio.fail_after(DEADLINE_S):
                reply = await self._carrier.handle_async_request(to_request(ask.url, ask.body, None, ask.method, ask.headers))
                try:
                    body = b""
                    async for data in _iterate(reply):
                        body += data
                        if len(body) > ask.most_bytes:
                            raise too_long(ask)
                finally:
                    await reply.aclose()
        except (httpx.TransportError, TimeoutError) as error:
            raise unreachable(ask, error) from None
        return Reply(reply.status_code, reply.headers.get("content-type", ""), body)


class _Opened(httpx.AsyncByteStream):
    """The content of an answer, while it comes."""

    def __init__(self, reply: httpx.Response, answer: Answer, padding: AsyncPaddingReader) -> None:
        self._reply = reply
        self._padding = padding
        self._answer = answer
        self._chunks = _iterate(reply)
        self._first = b""
        self._is_over = False
        self._has_padding = False

    async def read_refusal(self) -> bytes:
        """Returns the beginning of an answer that is not sealed."""
        try:
            return await anext(self._chunks, b"")
        except httpx.TransportError:
            return b""

    async def read_head(self) -> None:
        """Reads until the head of the node's response is there."""
        try:
            while self._answer.head is None and not self._is_over:
                self._first += await self._read()
        except BrokenAnswerError as error:
            if self._answer.head is not None:  # it began, so it is not sent again
                raise httpx.RemoteProtocolError(f"{error}; {CUT_OFF}") from None
            raise FailedTryError(str(error)) from None
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise FailedTryError(f"the relay broke off ({type(error).__name__})") from None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._first:
            first, self._first = self._first, b""
            yield first
        while not self._is_over:
            try:
                content = await self._read()
            except BrokenAnswerError as error:
                raise httpx.RemoteProtocolError(f"{error}; {CUT_OFF}") from None
            if content:
                yield content

    async def aclose(self) -> None:
        if not self._has_padding:
            await self._reply.aclose()
            return
        self._has_padding = False
        await self._padding.read(self._chunks, self._reply.aclose)

    async def _read(self) -> bytes:
        data = await anext(self._chunks, None)
        if data is None:
            self._is_over = True
            return self._answer.close()
        content = self._answer.feed(data)
        if self._answer.is_complete:
            self._is_over = self._has_padding = True
            content += self._answer.complete()
        return content


def _iterate(reply: httpx.Response) -> AsyncIterator[bytes]:
    assert isinstance(reply.stream, httpx.AsyncByteStream)
    return aiter(reply.stream)
