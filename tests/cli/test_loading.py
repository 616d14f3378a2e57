"""What a person reads while a model is loaded."""

import io
import logging
import os
import select
import time

import pytest

from cloister.launch.loading import Loading
from cloister.types.clock import VirtualClock


def wait_for(found):
    end_s = time.monotonic() + 300
    while not found():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_quick_load_says_nothing():
    stream = io.StringIO()
    with Loading("m", quick_s=60.0, stream=stream) as loading:
        loading.begin("reading the model")
    assert stream.getvalue() == ""


def test_a_long_load_has_a_line_at_its_start_and_one_at_its_end():
    stream, clock = io.StringIO(), VirtualClock()
    with Loading("dir/m", quick_s=0.0, stream=stream, clock=clock) as loading:
        loading.begin("reading the model")
        wait_for(stream.getvalue)
        assert list(loading.track(range(3), "packing", 3)) == [0, 1, 2]
        clock.advance(4.2)
    assert stream.getvalue() == "loading m: reading the model\nloaded m in 4.2 s\n"


def test_a_load_that_goes_on_says_again_and_again_where_it_is():
    stream, clock = io.StringIO(), VirtualClock()
    with Loading("m", quick_s=0.0, report_s=0.01, stream=stream, clock=clock) as loading:
        loading.begin("reading the tokenizer")
        wait_for(stream.getvalue)
        codes = loading.track(range(56), "choosing codes by text, once", 56)
        for _ in range(3):
            next(codes)
        clock.advance(41.0)
        wait_for(lambda: "still loading m after 41 s: choosing codes by text, once, 2 of 56\n" in stream.getvalue())
    said = stream.getvalue()
    assert said.startswith("loading m: reading the tokenizer\n")
    assert said.endswith("loaded m in 41.0 s\n")
    time.sleep(0.1)
    assert stream.getvalue() == said


def test_a_load_that_fails_is_not_called_done():
    stream = io.StringIO()

    def fail():
        with Loading("m", quick_s=0.0, stream=stream) as loading:
            loading.begin("reading the model")
            wait_for(stream.getvalue)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert "loaded" not in stream.getvalue()


def test_what_comes_before_the_first_phase_does_not_count():
    stream = io.StringIO()
    with Loading("m", quick_s=0.0, stream=stream):
        time.sleep(0.02)
    assert stream.getvalue() == ""


def test_a_server_with_a_log_has_the_lines_in_its_log(caplog):
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "cloister"), Loading("m", quick_s=0.0, stream=stream) as loading:
        loading.begin("reading the model")
        wait_for(lambda: caplog.records)
    assert caplog.messages[0] == "loading m: reading the model"
    assert caplog.messages[1].startswith("loaded m in ")
    assert stream.getvalue() == ""


def test_a_terminal_shows_the_phase_and_is_clean_afterwards():
    far, near = os.openpty()
    shown = b""

    def read():
        nonlocal shown
        while select.select([far], [], [], 0)[0]:
            shown += os.read(far, 65536)
        return shown

    with open(near, "w") as stream:
        with Loading("m", quick_s=0.0, stream=stream) as loading:
            loading.begin("packing")
            wait_for(lambda: b"m: packing" in read())
        stream.write("END")
        stream.flush()
        wait_for(lambda: b"END" in read())  # a terminal passes on what is written to it a moment later
    os.close(far)
    assert b"loaded" not in shown
    assert shown.partition(b"END")[0].rstrip().endswith(b"\x1b[2K")  # the line was erased
