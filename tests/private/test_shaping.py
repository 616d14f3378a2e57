"""Answers on their way into sealed chunks, in real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from cloister.private.shaping import MAX_WAITING, ReplyWriter, open_reply
from cloister.trust.shape import ShapeError, TrafficShape, Unshaper

PRIVATE = TrafficShape(frame_bytes=128, tick_s=0.004, constant=False)
PARANOID = TrafficShape(frame_bytes=128, tick_s=0.004, constant=True)


@dataclass
class Wire:
    """What a relay sees, and what the client reads."""

    chunks: list[tuple[float, bytes, bool]] = field(default_factory=list)
    delay_s: float = 0.0

    async def emit(self, data: bytes, is_last: bool) -> None:
        self.chunks.append((time.monotonic(), data, is_last))
        await asyncio.sleep(self.delay_s)

    def read(self, *, required: bool = True) -> bytes:
        reader = Unshaper(required=required)
        said = b"".join([reader.feed(data) for _, data, _ in self.chunks])
        reader.close()
        return said


def answer(
    shape: TrafficShape | None, say: Callable[[ReplyWriter], Awaitable[None]], wire: Wire | None = None, **options: float
) -> Wire:
    wire = wire or Wire()

    async def run() -> None:
        async with asyncio.timeout(300), open_reply(shape, wire.emit, **options) as reply:
            await say(reply)

    asyncio.run(run())
    return wire


async def say_three_words(reply: ReplyWriter) -> None:
    await reply.head(b"head\n\n")
    for word in (b"one\n\n", b"two\n\ntwo and a half\n\n"):
        await reply.write(word)
    await reply.write(b"three\n\nend", last=True)


SAID = b"head\n\none\n\ntwo\n\ntwo and a half\n\nthree\n\nend"


def test_open_sends_one_chunk_a_flush() -> None:
    wire = answer(None, say_three_words)
    assert [data for _, data, _ in wire.chunks] == [b"head\n\none\n\n", b"two\n\ntwo and a half\n\n", b"three\n\nend"]
    assert [is_last for *_, is_last in wire.chunks] == [False, False, True]
    assert wire.read(required=False) == SAID


def test_private_sends_one_event_a_frame() -> None:
    wire = answer(PRIVATE, say_three_words)
    assert {len(data) for _, data, _ in wire.chunks} == {128}
    assert len(wire.chunks) == 5
    assert wire.read() == SAID


def test_paranoid_fills_the_bucket_after_the_answer_and_begins_before_it() -> None:
    wire = Wire()

    async def think_first(reply: ReplyWriter) -> None:
        while len(wire.chunks) < 10:  # were frames to wait for the answer, this would never end
            await asyncio.sleep(0.001)
        await say_three_words(reply)

    answer(PARANOID, think_first, wire)
    assert len(wire.chunks) == 64
    assert wire.read() == SAID


@pytest.mark.parametrize("shape", [PRIVATE, PARANOID])
def test_an_error_in_the_middle_is_told_inside_the_shape_and_goes_on_to_the_caller(shape: TrafficShape) -> None:
    wire = Wire()

    async def break_down(reply: ReplyWriter) -> None:
        await reply.write(b"one\n\n")
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        answer(shape, break_down, wire)
    assert wire.chunks[-1][2]
    assert len(wire.chunks) == (64 if shape.constant else 1)
    with pytest.raises(ShapeError, match="node failed"):
        wire.read()


def test_an_error_in_the_open_leaves_out_the_final_chunk() -> None:
    wire = Wire()

    async def break_down(reply: ReplyWriter) -> None:
        await reply.write(b"one\n\n")
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        answer(None, break_down, wire)
    assert [is_last for *_, is_last in wire.chunks] == [False]


def test_who_cancels_stops_it_at_once() -> None:
    wire = Wire()

    async def run() -> None:
        async with asyncio.timeout(0.03), open_reply(PARANOID, wire.emit) as reply:
            await reply.write(b"one\n\n")
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert len(wire.chunks) < 20


def test_a_reader_that_is_slow_slows_the_writer_down() -> None:
    most = 0

    async def flood(reply: ReplyWriter) -> None:
        for _ in range(3 * MAX_WAITING):
            await reply.write(b"word\n\n")
            nonlocal most
            most = max(most, reply._shaper.num_waiting)  # type: ignore[attr-defined]
        await reply.write(b"end", last=True)

    wire = answer(TrafficShape(frame_bytes=64, tick_s=0.001, constant=False), flood)
    assert most <= MAX_WAITING
    assert wire.read() == b"word\n\n" * 3 * MAX_WAITING + b"end"


@pytest.mark.parametrize("shape", [None, PRIVATE, PARANOID])
def test_a_reader_that_is_gone_ends_the_wait(shape: TrafficShape | None) -> None:
    with pytest.raises(TimeoutError):
        answer(shape, say_three_words, Wire(delay_s=30), write_timeout_s=0.03)
