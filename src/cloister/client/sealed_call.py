"""One sealed request, from the first draw to the last byte of its answer. No I/O: drivers perform its operations.

`make_sealed_call` is a generator: it yields an `Operation`, receives its outcome or error, and returns the reader of the
answer. `SealedTransport` and `AsyncSealedTransport` are its two drivers.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx

from cloister.client.attempts import CUT_OFF, Attempts, is_answer, read_timeouts, refuse_reply, to_fields, to_request
from cloister.client.envelope import Answer, BrokenAnswerError, strip_request
from cloister.client.errors import FailedTryError, SealedError
from cloister.client.images import check_images
from cloister.client.node_selection import MAX_DRAWS
from cloister.client.protocol import Ask, unreachable
from cloister.client.session import PreparedRequest, Session
from cloister.trust.sealing import HttpRequest


@dataclass(frozen=True)
class Prepare:
    """Run `Session.prepare`, one at a time; the outcome is its `PreparedRequest`."""


@dataclass(frozen=True)
class PostRequest:
    """Send a request; the outcome is the `httpx.Response`, whose body is not read."""

    request: httpx.Request


@dataclass(frozen=True)
class Receive:
    """Wait for the next bytes of that body; the outcome is bytes, or None at its end."""


@dataclass(frozen=True)
class HangUp:
    """Close that response; there is no outcome."""


Operation = Prepare | PostRequest | Receive | HangUp


class AnswerReader:
    """Reads the body of one answer.

    Attributes:
        is_over: whether the content is complete, so that only padding may remain.
        has_padding: whether padding remains to be read.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_over = False
        self.has_padding = False
        self._first = b""

    def take_first(self) -> bytes:
        """Returns content that arrived with the head, once."""
        first, self._first = self._first, b""
        return first

    def take(self, data: bytes | None) -> bytes:
        """Processes the next bytes of the body, None at its end, and returns the content that they complete.

        Raises:
            httpx.RemoteProtocolError: the answer was cut off or changed.
        """
        try:
            return self._take(data)
        except BrokenAnswerError as error:
            raise httpx.RemoteProtocolError(f"{error}; {CUT_OFF}") from None

    def read_head(self) -> Generator[Operation, Any, None]:
        """Reads until the head of the node's response has arrived.

        Raises:
            FailedTryError: none arrived; another draw may succeed.
            httpx.RemoteProtocolError: it arrived, but the rest was cut off; the answer began, so the request is not sent again.
        """
        try:
            while self.answer.head is None and not self.is_over:
                self._first += self._take((yield Receive()))
        except BrokenAnswerError as error:
            if self.answer.head is not None:
                raise httpx.RemoteProtocolError(f"{error}; {CUT_OFF}") from None
            raise FailedTryError(str(error)) from None
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise FailedTryError(f"the relay broke off ({type(error).__name__})") from None

    def _take(self, data: bytes | None) -> bytes:
        if data is None:
            self.is_over = True
            return self.answer.close()
        content = self.answer.feed(data)
        if self.answer.is_complete:
            self.is_over = self.has_padding = True
            content += self.answer.complete()
        return content


@dataclass(frozen=True)
class Answered:
    """An answer that began."""

    reader: AnswerReader
    ready: PreparedRequest
    attempts: Attempts


def make_sealed_call(session: Session, request: httpx.Request, content: bytes) -> Generator[Operation, Any, Answered]:
    """Draws nodes until one begins to answer, at most `MAX_DRAWS`.

    Args:
        request: the program's request.
        content: its whole body.

    Raises:
        SealedError: there is no answer; see `SealedTransport`.
        httpx.RemoteProtocolError, httpx.TimeoutException: an answer began, and was cut off or timed out.
    """
    attempts = Attempts(request)
    while len(attempts) < MAX_DRAWS:
        try:
            ready: PreparedRequest = yield Prepare()
            _check_images(session, ready, content)
            plain = strip_request(request.method, request.url.raw_path, to_fields(request), content, session.now())
            reader = yield from _attempt(session, request, plain, ready, attempts)
            return Answered(reader, ready, attempts)
        except FailedTryError as error:
            attempts.fail(error)
            session.doubt()
        except SealedError as error:
            if (ended := attempts.conclude(error)) is error:
                raise
            raise ended from error
    raise attempts.give_up()


def _check_images(session: Session, ready: PreparedRequest, content: bytes) -> None:
    """Refuses images that the verified profile of the nodes refuses, or that nothing would cover on the way.

    Raises:
        ImagesRefusedError: nothing was sent.
    """
    try:
        check_images(content, ready.epoch.profile, ready.size_class)
    except SealedError:
        session.give_back(ready)
        raise


def _attempt(
    session: Session, request: httpx.Request, plain: HttpRequest, ready: PreparedRequest, attempts: Attempts
) -> Generator[Operation, Any, AnswerReader]:
    attempts.draw(ready)
    envelope = ready.seal(plain, session.now())
    attempts.num_sent += 1
    try:
        reply: httpx.Response = yield PostRequest(to_request(session.relay, envelope.sealed, read_timeouts(request)))
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        attempts.num_sent -= 1
        session.give_back(ready)
        raise unreachable(Ask("the relay", session.relay), error) from None
    except httpx.TimeoutException:
        raise
    except httpx.TransportError as error:
        raise FailedTryError(f"the relay broke off ({type(error).__name__})") from None
    reader = AnswerReader(envelope.answer)
    try:
        if not is_answer(reply):
            refuse_reply(reply.status_code, (yield from _read_refusal()))
        yield from reader.read_head()
    except Exception:
        yield HangUp()
        raise
    return reader


def _read_refusal() -> Generator[Operation, Any, bytes]:
    """Returns the beginning of an unsealed answer."""
    try:
        data: bytes | None = yield Receive()
    except httpx.TransportError:
        return b""
    return data or b""
