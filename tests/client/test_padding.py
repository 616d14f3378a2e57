"""Who has read an answer is done with it at once; its padding is read to the end all the same, as a relay can see."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest

from cloister.client.envelope import Answer
from cloister.client.sealed_call import AnswerReader
from cloister.client.transport import (
    AnswerStream,
    AsyncAnswerStream,
    AsyncPaddingReader,
    PaddingReader,
    _AsyncOpenReply,
    _OpenReply,
)
from cloister.trust.sealing import ResponseHead
from cloister.trust.shape import Shaper, shape_of
from tests.client.test_envelope import Way, write

TIMEOUT_S = 60.0


def speak(*, is_whole: bool = True) -> tuple[Answer, list[bytes]]:
    """A short answer under `paranoid`, and what the relay carries of it."""
    way, shape = Way(write("paranoid")), shape_of("paranoid")
    assert shape is not None
    shaper = Shaper(shape, 0.0)
    shaper.head(way.node.head(ResponseHead(200)))
    shaper.write(way.node.content(b"data: hello\n\n"), 0.0)
    shaper.write(way.node.content(b"data: [DONE]\n\n") + (way.node.end() if is_whole else b""), 0.0, last=True)
    carried = [way.begin()]
    while (due_s := shaper.due_s) is not None:
        frame = shaper.take(due_s)
        assert frame is not None
        carried.append(way.carry(frame.data, last=frame.is_last))
    return way.answer, carried


@dataclass
class Line(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The way from the relay: the padding comes when it is told to.

    Attributes:
        is_over: the last byte has been read.
        was_cut: somebody hung up before it.
    """

    carried: list[bytes]
    padding_comes: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    was_cut: bool = False

    def __iter__(self) -> Iterator[bytes]:
        for number, data in enumerate(self.carried):
            if number > 5:
                assert self.padding_comes.wait(TIMEOUT_S)
            yield data
        self.is_over.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, data in enumerate(self.carried):
            while number > 5 and not self.padding_comes.is_set():
                await asyncio.sleep(0.001)
            yield data
        self.is_over.set()

    def close(self) -> None:
        self.was_cut = not self.is_over.is_set()

    async def aclose(self) -> None:
        self.close()


@dataclass
class Relay(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Answers whatever it is asked."""

    line: Line

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=self.line)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


POSTED = httpx.Request("POST", "http://relay.test")


def open_answer(line: Line, answer: Answer, padding: PaddingReader) -> AnswerStream:
    """The content of an answer whose head was read."""
    reply, reader = _OpenReply(Relay(line)), AnswerReader(answer)
    reply.open(POSTED)
    reading = reader.read_head()
    with suppress(StopIteration):
        operation = next(reading)
        while True:
            operation = reading.send(reply.perform(operation))
    return AnswerStream(reply, reader, padding)


def test_a_reader_has_its_answer_before_the_padding_came() -> None:
    answer, carried = speak()
    line, padding = Line(carried), PaddingReader()
    opened = open_answer(line, answer, padding)
    assert b"".join(opened) == b"data: hello\n\ndata: [DONE]\n\n"
    opened.close()
    assert not line.is_over.is_set()
    line.padding_comes.set()
    padding.wait()
    assert line.is_over.is_set()
    assert not line.was_cut


def test_a_task_has_its_answer_before_the_padding_came() -> None:
    answer, carried = speak()
    line = Line(carried)

    async def run() -> None:
        padding = AsyncPaddingReader()
        reply = _AsyncOpenReply(Relay(line))
        await reply.open(POSTED)
        opened = AsyncAnswerStream(reply, AnswerReader(answer), padding)
        assert b"".join([data async for data in opened]) == b"data: hello\n\ndata: [DONE]\n\n"
        await opened.aclose()
        assert not line.is_over.is_set()
        line.padding_comes.set()
        await padding.wait()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert line.is_over.is_set()
    assert not line.was_cut


def test_who_leaves_in_the_middle_hangs_up() -> None:
    answer, carried = speak()
    line = Line(carried)
    opened = open_answer(line, answer, PaddingReader())
    opened.close()
    assert line.was_cut


def test_an_answer_that_says_it_is_complete_and_is_not_is_broken() -> None:
    answer, carried = speak(is_whole=False)
    opened = open_answer(Line(carried), answer, PaddingReader())
    with pytest.raises(httpx.RemoteProtocolError):
        b"".join(opened)
