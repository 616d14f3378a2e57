"""Ratchets: what a decode step does besides its arithmetic, counted, never timed. The counts may fall and must not rise.

Counted on a model that computes nothing (`benchmarks.idle`), so that everything counted is our own:

- program calls: calls of the back end, by any method; each takes the GIL back once.
- Python calls: Python functions entered, which is what a step's Python costs (about 0.1 us each when hot).
- C calls: C functions and methods that Python code calls.
- peak: bytes that a step holds beyond what it found, at most; the median over steps. A copy of the logits shows here.
- kept blocks: memory blocks that a step leaves behind. The tokens of the answers grow; nothing else may.

To lower one: run `python -m benchmarks.step_overhead` to see which part of a step costs, count the calls by function with
`sys.setprofile` (as `count_calls` below), take away what a token does not need, and put the new count, rounded up, into
`LIMITS`. To raise one takes a reason in the commit that does.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from types import FrameType

import pytest

from benchmarks.idle import IdleDrawingProgram, IdleGreedyProgram, IdleProgram, make_idle_engine
from cloister.engine import EngineCore
from cloister.types.events import Submit
from cloister.types.request import Request, SamplingParams

NUM_STEPS = 32
"""Two KV blocks of every sequence, so that growing is counted too."""
PROMPT_TOKENS = 40
VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class Limit:
    """What one decode step may cost, as a mean over `NUM_STEPS`."""

    program_calls: float
    python_calls: float
    c_calls: float
    peak_kib: float
    kept_blocks: float


GREEDY, DRAWING = "program finds tokens", "program draws tokens"
LOGITS, DRAWN = "greedy from logits", "drawn from logits"
PROGRAMS = {GREEDY: IdleGreedyProgram, DRAWING: IdleDrawingProgram, LOGITS: IdleProgram, DRAWN: IdleProgram}
LIMITS = {
    #                  program  Python  C    peak KiB  kept
    (GREEDY, 1): Limit(1, 124, 89, 6, 1),
    (GREEDY, 16): Limit(1, 470, 620, 12, 4.5),
    (DRAWING, 1): Limit(1, 128, 94, 9, 1),
    (DRAWING, 16): Limit(1, 474, 625, 14, 4.5),
    (LOGITS, 1): Limit(1, 132, 99, 10, 1),
    (LOGITS, 16): Limit(1, 481, 636, 15, 4.5),
    (DRAWN, 1): Limit(1, 179, 150, 142, 1),
    (DRAWN, 16): Limit(1, 562, 724, 1110, 4.5),
}
"""By how tokens are chosen and how many sequences decode: what was counted on Python 3.11, calls rounded up, so that one call
more in every step fails. Every count is the same in every run (`SlowingClock`); 3.12 and later enter fewer functions.
"""


class SlowingClock:
    """A clock that moves by itself, by a hundredth more each time it is read.

    What the scheduler learns depends on how long steps take (`scheduler/budget.py`): a fit with coefficients below zero costs
    some calls more. By the machine's clock that would happen in some steps and not in others. By this one it happens in every
    step.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._delta_s = 1e-3

    def now(self) -> float:
        self._now_s += self._delta_s
        self._delta_s *= 1.01
        return self._now_s


@dataclass
class Decoding:
    """An engine whose every sequence decodes."""

    program: IdleProgram
    core: EngineCore

    def run(self) -> None:
        for _ in range(NUM_STEPS):
            outputs = self.core.step()
            assert outputs is not None
            assert all(output.finish_reason is None for output in outputs.outputs)


def start(kind: str, num_seqs: int) -> Decoding:
    """Returns an engine that has computed its prompts, every one another, and some steps more."""
    program = PROGRAMS[kind](VOCAB_SIZE, num_seqs)
    core = make_idle_engine(program, vocab_size=VOCAB_SIZE, num_seqs=num_seqs, clock=SlowingClock()).core
    sampling = SamplingParams(temperature=1.0 if kind in (DRAWING, DRAWN) else 0.0, seed=1, max_tokens=1000, ignore_eos=True)
    for i in range(num_seqs):
        prompt = list(range(10 + i, 10 + i + PROMPT_TOKENS))
        core.input_queue.put(Submit(Request(request_id=f"r{i}", token_ids=prompt, sampling=sampling)))
    decoding = Decoding(program, core)
    decoding.run()
    return decoding


def count_calls(decoding: Decoding) -> Counter[str]:
    """Returns how often Python functions ("call") and C functions ("c_call") were called in `NUM_STEPS` steps.

    Garbage is not collected meanwhile: libraries have the interpreter call them then (`gc.callbacks`), and so do finalisers of
    what other tests left.
    """
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: object) -> None:
        counts[event] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        decoding.run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def measure_peak(decoding: Decoding) -> float:
    """Returns the median over steps of the bytes that a step holds beyond those that it found."""
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(NUM_STEPS):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            decoding.core.step()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return float(sorted(peaks)[NUM_STEPS // 2])


def count_kept_blocks(decoding: Decoding) -> int:
    before = sys.getallocatedblocks()
    decoding.run()
    return sys.getallocatedblocks() - before


@pytest.mark.parametrize(("kind", "num_seqs"), LIMITS)
def test_a_decode_step_costs_no_more_than_it_did(kind: str, num_seqs: int) -> None:
    limit, decoding = LIMITS[kind, num_seqs], start(kind, num_seqs)
    num_before = decoding.program.num_calls
    calls = count_calls(decoding)
    found = Limit(
        (decoding.program.num_calls - num_before) / NUM_STEPS,
        calls["call"] / NUM_STEPS,
        calls["c_call"] / NUM_STEPS,
        measure_peak(decoding) / 1024,
        count_kept_blocks(decoding) / NUM_STEPS,
    )
    for name in Limit.__dataclass_fields__:
        assert getattr(found, name) <= getattr(limit, name), f"{kind}, {num_seqs} sequences: {name} rose, {found}"
