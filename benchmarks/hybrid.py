"""B4, POD-Attention: one call for a chunk of a prompt and decoding sequences, against two calls one after the other.

POD-Attention (Kamath et al., ASPLOS 2025): prefill is bound by arithmetic and decode by memory, so attention of both belongs
into one kernel. On a CPU both stand in one list of tasks that is dealt to threads (`native/cpp/program.cpp`). The whole call
gains more than attention does, because weights are read once instead of twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Bench, make_parser, make_progress
from benchmarks.peers.meter import IDLE_CORES, Usage
from cloister.backends.base import LOGITS, ForwardBatch, Weights
from cloister.backends.recording import OperatorSpan
from cloister.bench.plots import COLOURS, GREY, draw
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import Driver, RandomWeights, build, make_spec

SPEC = make_spec(hidden=896, intermediate=4864, heads=(14, 2), head_dim=64, num_layers=4, vocab=2048)
BLOCK_SIZE = 16
CHUNKS, DECODES, CONTEXTS = (128, 512, 1024, 2048), (1, 4, 16, 48), (256, 2048)
PROMPT = 0
"""The sequence whose prompt is computed; those that decode count from 1."""
NUM_POSITIONS = max(CONTEXTS) + max(CHUNKS)
_TIME_S, _FEWEST, _MOST = 0.6, 7, 25
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cell:
    """A chunk of a prompt of which `context` tokens are computed, beside sequences of `context` tokens that decode one."""

    chunk: int
    num_decodes: int
    context: int


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of each repeat, [num_repeats]: of the one call, and of the two together."""

    hybrid: Times
    sequence: Times

    @property
    def gain(self) -> float:
        """How many times as long the two take, by medians."""
        return float(np.median(self.sequence) / np.median(self.hybrid))

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the gain of each repeat."""
        low, high = np.percentile(self.sequence / self.hybrid, (25, 75))
        return float(low), float(high)

    @property
    def slower(self) -> bool:
        """Whether three of four repeats were slower in one call: more than the noise."""
        return self.quartiles[1] < 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell: whole calls, attention of them, and how many cores other programs took meanwhile.

    Attributes:
        first_call: what was seen at first, where the cell was measured again; and so `first_attention`.
    """

    call: Pair
    attention: Pair
    other_cores: float
    first_call: Pair | None = None
    first_attention: Pair | None = None


class Bed:
    """A program whose cache holds a prompt and sequences that decode, and the batches to run on it."""

    def __init__(self, name: str, num_threads: int) -> None:
        weights: Weights = RandomWeights(SPEC)
        if name != "bfloat16":
            weights = QuantizedWeights(weights, FORMATS.get(name)(FormatOptions()))
        num_slots = [NUM_POSITIONS] + [max(CONTEXTS) + 1] * max(DECODES)
        counts = [-(-slots // BLOCK_SIZE) for slots in num_slots]
        self.driver: Driver = build(
            SPEC,
            weights,
            backend="native",
            num_blocks=sum(counts),
            block_size=BLOCK_SIZE,
            num_threads=num_threads,
            dtype="bfloat16",
        )
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        self._tables = np.split(order, np.cumsum(counts)[:-1])
        self._fill()

    def _fill(self) -> None:
        """Computes the longest context once, and copies it to every sequence that decodes."""
        self.driver.program.step(self.batch([(PROMPT, 0, max(CONTEXTS))]), LOGITS)
        num_blocks = max(CONTEXTS) // BLOCK_SIZE
        source = self._tables[PROMPT][:num_blocks].tolist()
        for table in self._tables[1:]:
            self.driver.program.copy_blocks(list(zip(source, table[:num_blocks].tolist(), strict=True)))

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        """Returns a batch of (sequence, first position, tokens) that wants the last logits of each."""
        counts = [count for _, _, count in parts]
        ends = np.cumsum([0, *counts]).astype(np.int32)
        tables = np.full((len(parts), len(self._tables[PROMPT])), -1, np.int32)
        for row, (seq, _, _) in enumerate(parts):
            tables[row, : len(self._tables[seq])] = self._tables[seq]
        return ForwardBatch(
            token_ids=np.random.default_rng(ends[-1]).integers(0, SPEC.vocab_size, ends[-1]).astype(np.int32),
            positions=np.concatenate([np.arange(start, start + count) for _, start, count in parts]).astype(np.int32),
            query_starts=ends,
            context_lens=np.array([start + count for _, start, count in parts], np.int32),
            block_tables=tables,
            logit_rows=ends[1:] - 1,
        )

    def batches(self, cell: Cell) -> tuple[ForwardBatch, ForwardBatch, ForwardBatch]:
        """Returns the hybrid batch, and its two halves."""
        prefill = [(PROMPT, cell.context, cell.chunk)]
        decodes = [(seq, cell.context, 1) for seq in range(1, cell.num_decodes + 1)]
        return self.batch([*prefill, *decodes]), self.batch(prefill), self.batch(decodes)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--formats", nargs="+", default=["int8", "bfloat16"], help="of weights; KV is bfloat16")
    parser.add_argument("--max-attempts", type=int, default=2, help="at a cell while other programs disturb it")
    options = parser.parse_args()
    options.num_threads = options.num_threads or 2
    bench = Bench(
        "hybrid",
        "B4 POD-Attention: one hybrid call against prefill and decode in sequence",
        "the call is never slower, and faster by what reading the weights for the decodes takes: most with short chunks; "
        "attention gains where few decodes cannot keep two threads busy, else it is level",
    )
    cells = [Cell(*sizes) for sizes in ((c, d, n) for n in CONTEXTS for c in CHUNKS for d in DECODES)]
    found: dict[tuple[str, Cell], Measured] = {}
    with make_progress() as progress:
        task = progress.add_task("cells", total=len(cells) * len(options.formats))
        for name in options.formats:
            bed = Bed(name, options.num_threads)
            progress.update(task, description=name)
            for cell in cells:
                found[name, cell] = measure(bed, cell, options.max_attempts)
                progress.advance(task)
    for name in options.formats:
        show(bench, name, {cell: measured for (of, cell), measured in found.items() if of == name})
    judge(bench, list(found.values()))
    plot(bench, options, found)
    return bench.finish(options)


def measure(bed: Bed, cell: Cell, max_attempts: int) -> Measured:
    """Measures a cell, again while other programs disturb it; the least disturbed attempt counts.

    Of 64 cells that are level some seem slower by chance, so one that does is measured once more, four times as often, and that
    counts.
    """
    found = min_disturbed(bed, cell, max_attempts, 1)
    if not (found.call.slower or found.attention.slower):
        return found
    return replace(min_disturbed(bed, cell, max_attempts, 4), first_call=found.call, first_attention=found.attention)


def min_disturbed(bed: Bed, cell: Cell, max_attempts: int, factor: int) -> Measured:
    best: Measured | None = None
    for _ in range(max_attempts):
        before = Usage.read(os.getsid(0))
        call, attention = compare(bed, cell, factor)
        measured = Measured(call, attention, Usage.read(os.getsid(0)).other_cores_since(before))
        if best is None or measured.other_cores < best.other_cores:
            best = measured
        if measured.other_cores <= IDLE_CORES:
            break
    assert best is not None
    return best


def compare(bed: Bed, cell: Cell, factor: int) -> tuple[Pair, Pair]:
    """Times hybrid, prefill and decodes in turn, each repeat beginning with another of them: whole calls, and attention."""
    batches = bed.batches(cell)
    first_s = sum(time_call(bed, batch)[0] for batch in batches)
    repeats = factor * int(np.clip(_TIME_S / first_s, _FEWEST, _MOST))
    times = np.empty((2, repeats, len(batches)))
    for repeat in range(repeats):
        for place in range(len(batches)):
            which = (repeat + place) % len(batches)
            times[:, repeat, which] = time_call(bed, batches[which])
    call, attention = (Pair(part[:, 0], part[:, 1] + part[:, 2]) for part in times)
    return call, attention


def time_call(bed: Bed, batch: ForwardBatch) -> tuple[float, float]:
    """Seconds of one call, and of attention in all its layers: from when the first thread begins to when the last one ends."""
    program = bed.driver.program
    with program.record() as spans:
        started = time.perf_counter()
        program.step(batch, LOGITS)
        ended = time.perf_counter()
    return ended - started, sum(max(s.end_s for s in phase) - min(s.start_s for s in phase) for phase in phases(spans))


def phases(spans: Sequence[OperatorSpan]) -> Iterator[list[OperatorSpan]]:
    """Yields the spans of attention that belong together: those of the threads at work at the same time."""
    phase: list[OperatorSpan] = []
    for span in sorted((s for s in spans if s.name == "attention"), key=lambda s: s.start_s):
        if phase and span.start_s >= max(s.end_s for s in phase):
            yield phase
            phase = []
        phase.append(span)
    if phase:
        yield phase


def show(bench: Bench, name: str, found: dict[Cell, Measured]) -> None:
    headers = (
        "chunk, decodes at context", "call, ms", "in sequence, ms", "gain", "quartiles",
        "attention, ms", "in sequence, ms ", "gain ", "quartiles ", "other programs, cores",
    )  # fmt: skip
    rows = [
        [f"{c.chunk}, {c.num_decodes} at {c.context}", *columns(m.call), *columns(m.attention), round(m.other_cores, 2)]
        for c, m in found.items()
    ]
    bench.print_rows(f"Weights in {name}", headers, rows)


def columns(pair: Pair) -> list[object]:
    medians = [float(np.median(times)) * 1e3 for times in (pair.hybrid, pair.sequence)]
    low, high = pair.quartiles
    return [*medians, round(pair.gain, 3), f"{low:.2f} to {high:.2f}"]


def judge(bench: Bench, found: Sequence[Measured]) -> None:
    """The verdict: in how many cells was one call slower by more than the noise?"""
    for what, pairs, first in (
        ("the call", [m.call for m in found], [m.first_call for m in found]),
        ("attention", [m.attention for m in found], [m.first_attention for m in found]),
    ):
        gains = [pair.gain for pair in pairs]
        seemed = sum(pair is not None and pair.slower for pair in first)
        bench.figures[what] = {
            "mean gain": float(np.mean(gains)),
            "least": min(gains),
            "most": max(gains),
            "seemed slower": seemed,
        }
        count = sum(pair.slower for pair in pairs)
        bench.check(f"{what}: cells of {len(pairs)} slower than in sequence ({seemed} seemed so at first)", count, high=0)
        bench.check(f"{what}: mean gain ({min(gains):.2f} to {max(gains):.2f})", float(np.mean(gains)), low=1.0)
    bench.figures["most cores that other programs took"] = max(m.other_cores for m in found)


def plot(bench: Bench, options: argparse.Namespace, found: dict[tuple[str, Cell], Measured]) -> None:
    """Draws the gain over the chunk, a line for each number of decodes; dashed at the shorter context."""
    with draw(bench.picture(options), bench.title, len(options.formats), 2, size=(5.4, 3.4)) as panels:
        axes = iter(panels)
        for name in options.formats:
            for what in ("call", "attention"):
                panel = next(axes)
                for colour, decodes in zip(COLOURS, DECODES, strict=False):
                    for context in CONTEXTS:
                        gains = [getattr(found[name, Cell(chunk, decodes, context)], what).gain for chunk in CHUNKS]
                        style = "-" if context == max(CONTEXTS) else "--"
                        label = f"{decodes} decoding" if style == "-" else None
                        panel.plot(range(len(CHUNKS)), gains, style, color=colour, marker="o", markersize=3, label=label)
                panel.axhline(1, color=GREY, linewidth=0.8)
                panel.set_xticks(range(len(CHUNKS)), [str(chunk) for chunk in CHUNKS])
                panel.set_title(f"{name}, {'whole call' if what == 'call' else 'attention alone'}")
                panel.set_xlabel(f"tokens of the chunk (dashed: context {min(CONTEXTS)}, else {max(CONTEXTS)})")
                panel.set_ylabel("times as fast as in sequence")
                panel.legend()


if __name__ == "__main__":
    sys.exit(main())
