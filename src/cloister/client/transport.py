"""`SealedTransport`: an httpx transport that seals every request to a node that it draws, so that SDKs work unchanged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

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
from cloister.client.padding import PaddingReader
from cloister.client.protocol import DEADLINE_S, Ask, Reply, Step, too_long, unreachable
from cloister.client.restocking import Restocker
from cloister.client.session import PreparedRequest, Session
from cloister.privacy.sealing import HttpRequest
from cloister.types.errors import CloisterError

T = TypeVar("T")


class SealedTransport(httpx.BaseTransport):
    """Seals requests: `openai.OpenAI(http_client=httpx.Client(transport=SealedTransport(session)))`.

    Host, port and scheme of a request's URL mean nothing: the session knows the relay, and a node is drawn for each request.
    An API key in its headers goes nowhere; the session's own is shown to the issuer alone. Safe to use from several threads.

    Args:
        session: relay, trust, policy and tokens; may be shared.
        carrier: what speaks HTTP to relay and issuer; None makes a pooled one.

    `handle_request` raises, before anything left this machine: `EpochRefusedError`, `EvidenceRefusedError`, `NoTokensError`,
    `RelayUnreachableError`; after every draw failed: `NoAnswerError`; where another draw would not help: `FinalRefusalError`;
    at an answer that breaks off: `httpx.RemoteProtocolError`; at one that does not come in time: `httpx.ReadTimeout`.
    """

    def __init__(self, session: Session, carrier: httpx.BaseTransport | None = None) -> None:
        self._session = session
        self._carrier = carrier or httpx.HTTPTransport()
        self._padding = PaddingReader()
        self._lock = threading.Lock()
        self._restocker = Restocker(self._restock)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        Attempts.check_first(request)
        content = request.read()
        attempts = Attempts(request)
        while len(attempts) < MAX_DRAWS:
            try:
                ready = self.prepare()
                plain = strip_request(request.method, request.url.raw_path, to_fields(request), content, self._session.now())
                return self._try_once(request, plain, ready, attempts)
            except FailedTryError as error:
                attempts.fail(error)
                self._session.doubt()
            except SealedError as error:
                if (ended := attempts.conclude(error)) is error:
                    raise
                raise ended from error
        raise attempts.give_up()

    def prepare(self) -> PreparedRequest:
        """Fetches and verifies everything that the next request needs, and draws its node; for programs that show it."""
        with self._lock:
            ready = self._run(self._session.prepare())
            self._restocker.plan(self._session.restock_in_s)
            return ready

    def close(self) -> None:
        self._restocker.close()
        self._padding.wait()
        self._carrier.close()

    def _try_once(
        self, request: httpx.Request, plain: HttpRequest, ready: PreparedRequest, attempts: Attempts
    ) -> httpx.Response:
        attempts.draw(ready)
        envelope = ready.seal(plain, self._session.now())
        posted = to_request(self._session.relay, envelope.sealed, read_timeouts(request))
        attempts.num_sent += 1
        try:
            reply = self._carrier.handle_request(posted)
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
                refuse_reply(reply.status_code, stream.read_refusal())
            stream.read_head()
        except BaseException:
            reply.close()
            raise
        return to_response(envelope.answer, stream, ready, attempts)

    def _restock(self) -> None:
        with suppress(CloisterError):
            self._run(self._session.restock(), self._lock)

    def _run(self, step: Step[T], lock: AbstractContextManager[object] | None = None) -> T:
        """Carries a step; `lock` is held while it works, and not while it waits."""
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
        give_up_at = time.monotonic() + DEADLINE_S
        try:
            reply = self._carrier.handle_request(to_request(ask.url, ask.body, None, ask.method, ask.headers))
            try:
                body = b""
                for data in _iterate(reply):
                    body += data
                    if len(body) > ask.most_bytes:
                        raise too_long(ask)
                    if time.monotonic() > give_up_at:
                        raise httpx.ReadTimeout("the whole answer took too long")
            finally:
                reply.close()
        except httpx.TransportError as error:
            raise unreachable(ask, error) from None
        return Reply(reply.status_code, reply.headers.get("content-type", ""), body)


class _Opened(httpx.SyncByteStream):
    """The content of an answer, while it comes."""

    def __init__(self, reply: httpx.Response, answer: Answer, padding: PaddingReader) -> None:
        self._reply = reply
        self._padding = padding
        self._answer = answer
        self._chunks = _iterate(reply)
        self._first = b""
        self._is_over = False
        self._has_padding = False

    def read_refusal(self) -> bytes:
        """Returns the beginning of an answer that is not sealed."""
        try:
            return next(self._chunks, b"")
        except httpx.TransportError:
            return b""

    def read_head(self) -> None:
        """Reads until the head of the node's response is there."""
        try:
            while self._answer.head is None and not self._is_over:
                self._first += self._read()
        except BrokenAnswerError as error:
            if self._answer.head is not None:  # it began, so it is not sent again
                raise httpx.RemoteProtocolError(f"{error}; {CUT_OFF}") from None
            raise FailedTryError(str(error)) from None
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise FailedTryError(f"the relay broke off ({type(error).__name__})") from None

    def __iter__(self) -> Iterator[bytes]:
        if self._first:
            first, self._first = self._first, b""
            yield first
        while not self._is_over:
            try:
                content = self._read()
            except BrokenAnswerError as error:
                raise httpx.RemoteProtocolError(f"{error}; {CUT_OFF}") from None
            if content:
                yield content

    def close(self) -> None:
        if not self._has_padding:
            self._reply.close()
            return
        self._has_padding = False
        self._padding.read(self._chunks, self._reply.close)

    def _read(self) -> bytes:
        data = next(self._chunks, None)
        if data is None:
            self._is_over = True
            return self._answer.close()
        content = self._answer.feed(data)
        if self._answer.is_complete:
            self._is_over = self._has_padding = True
            content += self._answer.complete()
        return content


def _iterate(reply: httpx.Response) -> Iterator[bytes]:
    assert isinstance(reply.stream, httpx.SyncByteStream)
    return iter(reply.stream)
