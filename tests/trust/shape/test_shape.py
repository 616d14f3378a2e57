"""An answer in frames says the same to its reader, and less to those who watch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.policy.verdict import Profile
from cloister.trust.shape import SHAPES, Frame, ShapeError, Shaper, TrafficShape, Unshaper, find_edge, shape_of
from cloister.trust.shape.frames import ENDS, FAILS, MAX_FRAME_BYTES, encode_frame

PRIVATE = TrafficShape(frame_bytes=64, tick_s=0.01, constant=False)
PARANOID = replace(PRIVATE, constant=True)
Flushes = list[tuple[float, bytes]]
WORDS = st.binary(max_size=50).map(lambda data: data.replace(b"\n", b" "))
"""Flushes that are one event each."""


def play(shape: TrafficShape, flushes: Iterable[tuple[float, bytes]], *, fails: bool = False) -> list[tuple[float, Frame]]:
    """Gives flushes to a shaper at their times, the last one with the end; takes frames as they become due."""
    shaper, frames, ends = Shaper(shape, 0.0), [], 0.0
    waiting = sorted(flushes, key=lambda flush: flush[0])
    while not shaper.is_over:
        due_s = shaper.due_s
        if waiting and (due_s is None or waiting[0][0] <= due_s):
            now_s, data = waiting.pop(0)
            shaper.write(data, now_s, last=not waiting and not fails)
            ends = now_s
        elif not waiting and fails:
            shaper.fail(ends)
            fails = False
        else:
            assert due_s is not None
            frame = shaper.take(due_s)
            assert frame is not None
            frames.append((due_s, frame))
    return frames


def read(frames: Iterable[tuple[float, Frame]]) -> bytes:
    reader = Unshaper(required=True)
    said = b"".join([reader.feed(frame.data) for _, frame in frames])
    reader.close()
    return said


def event(text: bytes) -> bytes:
    return b"data: " + text + b"\n\n"


@given(
    shape=st.sampled_from([PRIVATE, PARANOID]),
    flushes=st.lists(st.tuples(st.floats(0, 0.3), st.binary(max_size=200)), min_size=1, max_size=12),
    cut=st.integers(1, 150),
)
def test_what_went_in_comes_out_however_it_is_cut(shape: TrafficShape, flushes: Flushes, cut: int) -> None:
    frames = play(shape, flushes)
    wire = b"".join(frame.data for _, frame in frames)
    reader = Unshaper(required=True)
    said = b"".join(reader.feed(wire[i : i + cut]) for i in range(0, len(wire), cut))
    reader.close()
    assert said == b"".join(data for _, data in sorted(flushes, key=lambda flush: flush[0]))
    assert [frame.is_last for _, frame in frames] == [False] * (len(frames) - 1) + [True]
    assert len({len(frame.data) for _, frame in frames}) == 1


@given(lengths=st.lists(st.integers(0, 40), min_size=2, max_size=30))
def test_private_shows_no_length_of_a_token(lengths: list[int]) -> None:
    shown = [
        [(time_s, len(frame.data)) for time_s, frame in play(PRIVATE, [(0.011 * i, event(b"x" * n)) for i, n in enumerate(ns)])]
        for ns in (lengths, [1] * len(lengths))
    ]
    assert shown[0] == shown[1]


def test_tokens_that_come_together_leave_one_by_one_on_ticks() -> None:
    burst = b"".join(map(event, (b"one", b"two", b"three")))
    frames = play(PRIVATE, [(0.001, event(b"zero")), (0.052, burst), (0.2, event(b"[DONE]") + b"\0\0")])
    assert [round(time_s, 6) for time_s, _ in frames] == [0.01, 0.06, 0.07, 0.08, 0.21]
    words = [Unshaper().feed(encode_frame(b"", 64, first=True) + frame.data) for _, frame in frames[1:]]
    assert words == [event(b"one"), event(b"two"), event(b"three"), event(b"[DONE]") + b"\0\0"]


def test_private_is_silent_while_there_is_nothing_to_say() -> None:
    shaper = Shaper(PRIVATE, 0.0)
    assert shaper.due_s is None
    shaper.write(event(b"a"), 0.0, last=False)
    assert shaper.take(0.009) is None
    assert shaper.take(0.01) is not None
    assert shaper.due_s is None


@given(
    one=st.lists(st.tuples(st.floats(0, 0.4), WORDS), min_size=1, max_size=15),
    two=st.lists(st.tuples(st.floats(0, 0.4), WORDS), min_size=1, max_size=15),
)
def test_paranoid_shows_the_same_whatever_is_said_and_when(one: Flushes, two: Flushes) -> None:
    shown = [[(time_s, len(frame.data)) for time_s, frame in play(PARANOID, flushes)] for flushes in (one, two)]
    assert shown[0] == shown[1]  # both fit into the smallest bucket
    assert len(shown[0]) == 64
    assert shown[0][0][0] == pytest.approx(0.01)  # the first tick, whether or not there was a word by then


def test_paranoid_sends_a_bucket_of_frames() -> None:
    for num_events, num_frames in ((1, 64), (64, 64), (65, 256), (300, 1024)):
        assert len(play(PARANOID, [(0.0, event(b"x"))] * num_events)) == num_frames
    assert [find_edge(n) for n in (1, 64, 65, 256, 257, 4097)] == [64, 64, 256, 256, 1024, 16384]


def test_a_missed_tick_is_not_made_up_for() -> None:
    shaper = Shaper(PARANOID, 0.0)
    times = [0.01, 0.047, 0.05, 0.06]
    assert all(shaper.take(now_s) for now_s in times)
    assert shaper.take(0.065) is None


@pytest.mark.parametrize("num_bytes", [1, 1000, 1014, 1015, 5000, 60_000])
def test_a_whole_answer_is_padded_as_requests_are_and_leaves_at_once(num_bytes: int) -> None:
    body = bytes(range(1, 251)) * 240
    frames = play(PRIVATE, [(0.003, body[:num_bytes])])
    total = sum(len(frame.data) for _, frame in frames)
    assert total in (1024, 4096, 16384, 65536)
    assert total == 1024 or total < 4 * (num_bytes + 100)
    assert {round(time_s, 6) for time_s, _ in frames} == {0.01}
    assert all(len(frame.data) <= MAX_FRAME_BYTES for _, frame in frames)
    assert read(frames) == body[:num_bytes]


def test_the_head_leaves_with_what_follows_it() -> None:
    shaper = Shaper(PRIVATE, 0.0)
    shaper.head(b"head ")
    assert shaper.due_s is None
    shaper.write(b"body", 0.0, last=True)
    assert read([(0.0, frame)] if (frame := shaper.take(0.01)) else []) == b"head body"


@pytest.mark.parametrize("shape", [PRIVATE, PARANOID])
def test_a_failure_is_told_to_the_reader_inside_the_shape(shape: TrafficShape) -> None:
    flushes = [(0.0, event(b"a")), (0.02, event(b"b"))]
    well, ill = play(shape, [*flushes, (0.02, b"")]), play(shape, flushes, fails=True)
    if shape.constant:
        assert [(time_s, len(frame.data)) for time_s, frame in well] == [(time_s, len(frame.data)) for time_s, frame in ill]
    assert ill[-1][1].is_last
    with pytest.raises(ShapeError, match="node failed"):
        read(ill)


def test_a_stream_that_is_cut_off_is_noticed() -> None:
    frames = play(PARANOID, [(0.0, event(b"a") * 3)])
    with pytest.raises(ShapeError, match="ended before"):
        read(frames[:2])
    with pytest.raises(ShapeError, match="ended before"):
        Unshaper(required=True).close()


def test_an_answer_without_a_shape_passes_only_where_none_was_promised() -> None:
    reader = Unshaper()
    assert reader.feed(b"\x03plain") + reader.feed(b" text") == b"\x03plain text"
    reader.close()
    with pytest.raises(ShapeError, match="do not use this node"):
        Unshaper(required=True).feed(b"\x03plain")


@pytest.mark.parametrize(
    "wire",
    [
        b"\xc1\x01" + (4).to_bytes(4),
        b"\xc1\x01" + (MAX_FRAME_BYTES + 1).to_bytes(4),
        encode_frame(b"abc", 64, first=True)[:-1] + b"x",
        encode_frame(b"", 64, first=True, flags=ENDS | FAILS),
        encode_frame(b"", 64, first=True).replace(b"\0\0\0\0\0", b"\0\0\0\0\x7f", 1),
        encode_frame(b"", 64, first=True, flags=ENDS) + encode_frame(b"more", 64, first=False),
    ],
)
def test_malformed_frames_are_refused(wire: bytes) -> None:
    with pytest.raises(ShapeError):
        Unshaper(required=True).feed(wire)


def test_profiles_ask_for_the_shapes_that_the_matrix_names() -> None:
    assert [profile for profile in Profile if SHAPES[profile] is None] == [Profile.OPEN, Profile.TEAM]
    private, paranoid = shape_of("private"), shape_of("paranoid")
    assert private is not None
    assert paranoid is not None
    assert (private.constant, paranoid.constant) == (False, True)


def steps_of(accepted: list[int]) -> Flushes:
    """Flushes of an engine that takes 50 ms a step, whose steps bring one token and those that were accepted."""
    return [(0.1 + 0.05 * number, event(b"x") * (1 + num)) for number, num in enumerate(accepted)]


def test_accepted_drafts_show_in_a_shape_that_can_be_silent() -> None:
    def gaps(accepted: list[int]) -> list[float]:
        times_s = [time_s for time_s, _ in play(PRIVATE, steps_of(accepted))]
        return [round(later - sooner, 3) for sooner, later in pairwise(times_s)]

    assert gaps([3, 0, 3, 0, 3]) != gaps([0, 3, 0, 3, 3])  # as many tokens, in as many steps
    shown = gaps([3, 0, 3, 0, 3])
    assert [index for index, gap_s in enumerate(shown) if gap_s > 1.5 * PRIVATE.tick_s] == [3, 4, 8, 9]  # one silence a step


@pytest.mark.parametrize("profile", [profile for profile in Profile if SHAPES[profile] is not None])
def test_while_drafts_are_verified_no_accepted_length_shows(profile: Profile) -> None:
    shape = shape_of(profile, drafts=True)
    assert shape is not None
    waves = [3, 0, 3, 0, 3], [0, 3, 0, 3, 3], [0] * 8
    one, *others = [[(time_s, len(frame.data)) for time_s, frame in play(shape, steps_of(accepted))] for accepted in waves]
    assert all(shown == one for shown in others)
    assert len(one) == 64


def test_profiles_without_a_shape_have_none_with_drafts() -> None:
    assert shape_of("open", drafts=True) is None
    assert shape_of("team", drafts=True) is None
