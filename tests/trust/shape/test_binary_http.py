"""Shaped answers that are Binary HTTP all the way: the same sizes and times, and readable by who knows the RFCs alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.policy.verdict import Profile
from cloister.trust.sealing import (
    BinaryHttpWriter,
    Content,
    HttpResponse,
    MessageError,
    MessageReader,
    ResponseHead,
    decode_response,
    find_field,
)
from cloister.trust.shape import SHAPES, BinaryHttpShaper, Frame, Shaper, TrafficShape, find_edge
from cloister.trust.shape.binary_http import PADDING_FIELD, PROCESSING
from tests.thinning import examples

PRIVATE, PARANOID = SHAPES[Profile.PRIVATE], SHAPES[Profile.PARANOID]
assert PRIVATE is not None
assert PARANOID is not None
STREAM = ResponseHead(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
JSON = ResponseHead(200, ((b"content-type", b"application/json"),))
each_shape = pytest.mark.parametrize("shape", [PRIVATE, PARANOID], ids=["private", "paranoid"])


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


def drain(shaper: Shaper, now_s: float) -> tuple[list[Frame], float]:
    """All frames that may leave without more being written, at the moment that each may."""
    frames = []
    while (due_s := shaper.due_s) is not None and len(frames) < 5000:
        now_s = max(now_s, due_s)
        frame = shaper.take(now_s)
        assert frame is not None
        frames.append(frame)
    return frames, now_s


def run(shaper: Shaper, head: ResponseHead, flushes: list[bytes], *, wait_s: float = 0.1, ends: bool = True) -> list[Frame]:
    """What a node sends that writes a flush every `wait_s`."""
    writer, frames, now_s = BinaryHttpWriter(), list[Frame](), 0.0

    def wait(until_s: float) -> None:
        while (due_s := shaper.due_s) is not None and due_s <= until_s:
            frame = shaper.take(due_s)
            assert frame is not None
            frames.append(frame)

    shaper.head(writer.head(head))
    for flush in flushes:
        now_s += wait_s
        wait(now_s)
        shaper.write(writer.content(flush), now_s)
    if ends:
        shaper.write(writer.end(), now_s, last=True)
    else:
        shaper.fail(now_s)
    frames += drain(shaper, now_s)[0]
    assert shaper.is_over
    assert [frame.is_last for frame in frames] == [False] * (len(frames) - 1) + [True]
    return frames


def read(frames: list[Frame]) -> HttpResponse:
    return decode_response(b"".join(frame.data for frame in frames))


def without_comments(content: bytes) -> list[bytes]:
    """The lines of an event stream that say something."""
    return [line for line in content.split(b"\n") if line and not line.startswith(b":")]


@each_shape
def test_a_stream_is_one_message_whose_events_come_back(shape: TrafficShape) -> None:
    events = [event(f"word {number} " + "x" * (7 * number % 300)) for number in range(40)]
    frames = run(BinaryHttpShaper(shape, 0.0), STREAM, events)
    assert {len(frame.data) for frame in frames} == {512}
    response = read(frames)
    assert response.head.status == 200
    assert find_field(response.head.fields, b"content-type") == "text/event-stream; charset=utf-8"
    assert without_comments(response.content) == [one.removesuffix(b"\n\n") for one in events]
    assert {head.status for head in response.informational} <= {PROCESSING}


@each_shape
def test_an_observer_sees_the_sizes_and_times_of_our_own_frames(shape: TrafficShape) -> None:
    events = [event("word")] * 30
    ours, theirs = (run(kind(shape, 0.0), STREAM, events) for kind in (Shaper, BinaryHttpShaper))
    assert {len(frame.data) for frame in ours} == {len(frame.data) for frame in theirs} == {512}
    if shape.constant:
        assert len(ours) == len(theirs) == find_edge(len(theirs))
    else:
        assert len(theirs) == len(ours) + 1, "the head has a frame of its own, for every answer"


def test_before_the_first_word_there_are_informational_responses_and_after_the_last_zeros() -> None:
    assert PARANOID is not None
    frames = run(BinaryHttpShaper(PARANOID, 0.0), STREAM, [event("late")], wait_s=0.5)
    response = read(frames)
    assert len(response.informational) == 25
    assert all(name == PADDING_FIELD for head in response.informational for name, _ in head.fields)
    assert len(frames) == 64
    assert frames[-1].data == bytes(512)
    assert without_comments(response.content) == [b"data: late"]


def test_each_event_can_be_read_when_its_frame_is_there() -> None:
    assert PRIVATE is not None
    frames = run(BinaryHttpShaper(PRIVATE, 0.0), STREAM, [event("one"), event("two")])
    reader, seen = MessageReader(), []
    for frame in frames:
        parts = reader.feed(frame.data)
        seen.append([line for part in parts if isinstance(part, Content) for line in without_comments(part.data)])
    assert seen == [[], [b"data: one"], [b"data: two"], []]


@each_shape
@pytest.mark.parametrize("num_bytes", [0, 1, 400, 900, 5000, 20_000])
def test_an_answer_that_is_no_stream_comes_whole_and_has_no_padding_inside(shape: TrafficShape, num_bytes: int) -> None:
    frames = run(BinaryHttpShaper(shape, 0.0), JSON, [b"x" * (num_bytes // 2), b"x" * (num_bytes - num_bytes // 2)])
    assert read(frames).content == b"x" * num_bytes
    total = sum(len(frame.data) for frame in frames)
    if shape.constant:
        assert len(frames) == find_edge(len(frames))
    else:
        assert total in (1024, 4096, 16384, 65536)


@each_shape
@pytest.mark.parametrize("head", [STREAM, JSON], ids=["stream", "whole"])
def test_an_answer_that_failed_lacks_its_end(shape: TrafficShape, head: ResponseHead) -> None:
    frames = run(BinaryHttpShaper(shape, 0.0), head, [event("one"), b"data: hal"], ends=False)
    assert {len(frame.data) for frame in frames} == {512}
    with pytest.raises(MessageError):
        read(frames)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.binary(max_size=1200).map(lambda b: b.replace(b"\n", b" ").replace(b":", b" ")), min_size=1, max_size=6),
    st.integers(0, 900),
    st.binary(max_size=40).map(lambda b: b.replace(b"\n", b" ").replace(b":", b" ")),
    st.sampled_from([PRIVATE, PARANOID]),
)
def test_whatever_is_said_comes_back_in_frames_of_one_size(
    texts: list[bytes], head_bytes: int, unfinished: bytes, shape: TrafficShape
) -> None:
    head = ResponseHead(200, (*STREAM.fields, (b"x-long", b"h" * head_bytes)))
    events = [b"data: " + text + b"\n\n" for text in texts]
    frames = run(BinaryHttpShaper(shape, 0.0), head, [b"".join(events), b"data: " + unfinished])
    assert {len(frame.data) for frame in frames} == {512}
    assert without_comments(read(frames).content) == [b"data: " + text for text in (*texts, unfinished)]
