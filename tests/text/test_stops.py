"""Stop strings in a stream against a search through the whole text, whatever the pieces."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.text import StopStrings
from cloister.types.errors import InvalidRequestError
from tests.thinning import examples

texts = st.text(alphabet="ab\n", max_size=30)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def search(text, stops, include_stop):
    """Walks on letter by letter until some stop string is complete; the longest such."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def stream(pieces, stops, include_stop):
    watcher = StopStrings(stops, include_stop)
    emitted = ""
    for piece in pieces:
        text, matched = watcher.push(piece)
        emitted += text
        if matched is not None:
            assert watcher.flush() == ""
            return emitted, matched
    return emitted + watcher.flush(), None


@settings(max_examples=examples(200), deadline=None)
@given(text=texts, stops=stops, cuts=st.lists(st.integers(0, 30)), include_stop=st.booleans())
def test_any_pieces_give_what_a_search_finds(text, stops, cuts, include_stop):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert stream(pieces, stops, include_stop) == search(text, stops, include_stop)


@settings(max_examples=examples(100), deadline=None)
@given(text=texts, stops=stops)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text, stops):
    watcher = StopStrings(stops)
    emitted, matched = watcher.push(text)
    if matched is None:
        held = text[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_after_a_match_nothing_passes():
    watcher = StopStrings(["END"])
    assert watcher.push("the END is") == ("the ", "END")
    assert watcher.push(" near") == ("", "END")


def test_without_stop_strings_all_passes_at_once():
    watcher = StopStrings([])
    assert watcher.push("anything") == ("anything", None)
    assert watcher.flush() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_long_stop_strings_cost_little_however_near_the_answer_comes():
    watcher = StopStrings(
        ["a" * 1000 + "c", *("b" * 1000 + str(i) for i in range(7)), *("ab" * 500 + str(i) for i in range(8))]
    )
    watcher.push("a" * 1000)
    began_s = time.process_time()
    for _ in range(500):
        assert watcher.push("a") == ("a", None)
    assert time.process_time() - began_s < 0.3
