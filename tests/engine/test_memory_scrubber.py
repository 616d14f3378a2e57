"""What requests leave in an engine is cleared away when they end: at once when it is idle, else soon."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from benchmarks.idle import IdleProgram, make_idle_engine
from cloister.engine.memory_scrubber import TIDY_EVERY_S, MemoryScrubber
from cloister.models import locate
from cloister.text import Tokenizer
from cloister.types.events import Submit
from cloister.types.request import Request, SamplingParams


class Loop:
    """Garbage that refers to itself, as a request and its sequences do."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def wipes() -> list[float]:
    return []


def test_garbage_that_refers_to_itself_goes_when_a_request_has_ended(wipes: list[float]) -> None:
    scrubber = MemoryScrubber(lambda: wipes.append(0.0))
    gc.disable()
    try:
        gone = weakref.ref(Loop())
        scrubber.tidy(0.0, is_idle=True)
        assert gone() is not None
        scrubber.note_end()
        scrubber.tidy(0.0, is_idle=True)
        assert gone() is None
    finally:
        gc.enable()
    assert len(wipes) == 1


def test_while_others_run_it_clears_away_now_and_then(wipes: list[float]) -> None:
    scrubber = MemoryScrubber(lambda: wipes.append(0.0))
    for step in range(100):
        scrubber.note_end()
        scrubber.tidy(1.0 + step * TIDY_EVERY_S / 10, is_idle=False)
    assert len(wipes) == 10


def test_an_idle_engine_has_cleared_away_what_its_last_request_left() -> None:
    wipes: list[float] = []
    engine = make_idle_engine(IdleProgram(4096, 8), vocab_size=4096, num_seqs=1)
    engine.core._scrubber = MemoryScrubber(lambda: wipes.append(0.0))
    ids = np.arange(1000, 1040).tolist()
    engine.core.input_queue.put(
        Submit(Request(request_id="a", token_ids=ids, sampling=SamplingParams(max_tokens=3, ignore_eos=True)))
    )
    assert engine.core.step() is not None
    assert not wipes
    while engine.core.step() is not None:
        pass
    assert wipes


def test_a_tokenizer_that_remembers_nothing_keeps_no_token_that_occurred() -> None:
    text = "An answer about a function."
    keeps, forgets = (Tokenizer(locate("cloister-5m"), remembers=remembers) for remembers in (True, False))
    ids = keeps.encode(text)
    assert keeps.decode(ids) == forgets.decode(ids) == text
    assert set(keeps._token_bytes) == set(ids)
    assert not forgets._token_bytes
