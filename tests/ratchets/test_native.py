"""Ratchets: what a decode step costs on the native back end besides its arithmetic. The counts may fall and must not rise.

- native calls: calls into compiled code, whichever method; the GIL is given up and taken back once for each.
- Python calls: Python functions that the program enters.
- phases: lists of tasks that the team is given, each a meeting of all threads (about 2 us on two of them).
- peak: bytes that Python holds beyond what it found.
- grown: bytes by which the kernels' buffers grew after the first step.

How to lower and raise them: as in `test_step`.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import GREEDY, SAMPLING_METADATA, ForwardBatch, Wants
from cloister.backends.native.program import NativeProgram
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import RandomWeights
from tests.native import NARROW, build_native

NUM_STEPS = 33
NUM_LAYERS = len(NARROW.layers)


@dataclass(frozen=True)
class Limit:
    """What one decode step may cost."""

    native_calls: float
    python_calls: float
    phases: float
    peak_bytes: float
    grown_bytes: float


BF16 = Limit(1, 2, 4 + 9 * NUM_LAYERS, 2048, 0)
DRAWN = Limit(1, 3, 5 + 9 * NUM_LAYERS, 2048, 0)
INT8 = Limit(1, 2, 4 + 10 * NUM_LAYERS, 2048, 0)
LIMITS = {
    ("none", 1, "best"): BF16,
    ("none", 16, "best"): BF16,
    ("none", 1, "draw"): DRAWN,
    ("none", 16, "draw"): DRAWN,
    ("int8", 1, "best"): INT8,
    ("int8", 16, "best"): INT8,
}
"""By number format, how many sequences decode, and how their tokens are chosen."""

Step = Callable[[ForwardBatch], object]


def make_drawing_step(program: NativeProgram, num_seqs: int) -> Step:
    """A step that draws by every kind of truncation in turn."""
    draws = np.zeros(num_seqs, SAMPLING_METADATA)
    draws["temperature"], draws["row"], draws["top_p"] = 0.8, np.arange(num_seqs), 1
    draws["top_k"][1::3], draws["top_p"][2::3] = 20, 0.9
    return partial(program.step, wants=Wants(sampling=draws))


class CountingProgram:
    """The compiled program, with a count of what is asked of it."""

    def __init__(self, program: Any) -> None:
        self._program, self.num_calls = program, 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._program, name)


def count_python_calls(program: NativeProgram, batch: ForwardBatch, take_step: Step) -> int:
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, what: object) -> None:
        calls[event] += 1

    sys.setprofile(note)
    try:
        take_step(batch)
    finally:
        sys.setprofile(None)
    return calls["call"]


def count_native_calls(program: NativeProgram, batch: ForwardBatch, take_step: Step) -> int:
    counting = CountingProgram(program._program)
    program._program = counting  # type: ignore[assignment]
    take_step(batch)
    program._program = counting._program
    return counting.num_calls


def measure_peak(program: NativeProgram, batch: ForwardBatch, take_step: Step) -> int:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        take_step(batch)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def measure(program: NativeProgram, batches: Sequence[ForwardBatch], take_step: Step) -> Limit:
    """Runs each batch once; the median over steps, so that a collection of garbage in one of them does not count."""
    num_phases, buffer_bytes = program.num_phases, program.buffer_bytes
    python_calls, native_calls, peaks = (
        median(count(program, batch, take_step) for batch in batches[start::3])
        for start, count in enumerate((count_python_calls, count_native_calls, measure_peak))
    )
    num_phases, grown = program.num_phases - num_phases, program.buffer_bytes - buffer_bytes
    return Limit(native_calls, python_calls, num_phases / len(batches), peaks, grown)


@pytest.mark.parametrize(("quant", "num_seqs", "choice"), LIMITS)
def test_a_native_decode_step_costs_no_more_than_it_did(quant: str, num_seqs: int, choice: str) -> None:
    weights = RandomWeights(NARROW)
    few_bits = weights if quant == "none" else QuantizedWeights(weights, FORMATS.get(quant)(FormatOptions()))
    driver = build_native(NARROW, few_bits, dtype="bfloat16", num_threads=2)
    parts = {number: [number + 1] for number in range(num_seqs)}
    driver.step({number: list(range(20)) for number in range(num_seqs)})
    batches = [driver.plan(parts) for _ in range(NUM_STEPS + 1)]
    assert isinstance(driver.program, NativeProgram)
    program = driver.program
    take_step = partial(program.step, wants=GREEDY) if choice == "best" else make_drawing_step(program, num_seqs)
    take_step(batches[0])
    found, limit = measure(driver.program, batches[1:], take_step), LIMITS[quant, num_seqs, choice]
    for name in Limit.__dataclass_fields__:
        assert getattr(found, name) <= getattr(limit, name), f"{quant}, {num_seqs} sequences, {choice}: {name} rose, {found}"
