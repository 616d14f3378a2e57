"""D2, D3: what a step of one sequence costs with 1 to 32 tokens to verify, as a chain and as a tree.

A decode step is bound by memory: weights and KV are read once however many tokens stand behind them, so drafts are nearly free
until arithmetic or logits count. A tree must cost what a chain of as many tokens costs: before it was computed as one sequence,
each node gathered the whole context again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness import MODEL, Bench, make_parser, make_progress
from cloister.backends import BACKENDS
from cloister.backends.base import GREEDY, ForwardBatch, KVLayout, Program, Weights
from cloister.backends.spec import DecoderSpec
from cloister.models import load, locate
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights

SIZES, CONTEXTS = (1, 2, 3, 4, 8, 16, 32), (200, 2000)
BLOCK_SIZE, CHUNK = 16, 512
Cell = tuple[int, int, bool]
"""Context, tokens, whether they are a tree."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and what its steps move.

    Attributes:
        weights_bytes, position_bytes: weights, and KV of one position.
    """

    name: str
    program: Program
    spec: DecoderSpec
    weights_bytes: int
    position_bytes: float

    def bytes_of(self, context: int, num_tokens: int) -> float:
        """What memory moves in a step: weights and KV once, logits written (a line is read before it is written) and read."""
        return self.weights_bytes + context * self.position_bytes + 3 * 4 * self.spec.vocab_size * num_tokens


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=MODEL, help="embedded model or directory")
    parser.add_argument("--quant", default="none", help="format that weights are brought to")
    parser.add_argument("--name", default="tree_steps", help="of the file that it leaves")
    parser.add_argument("--num-rounds", type=int, default=20, help="steps of each kind, in turn")
    parser.set_defaults(num_threads=1)
    options = parser.parse_args()
    subject = open_subject(options)
    clock = "processor time of one thread" if options.num_threads == 1 else f"wall time of {options.num_threads} threads"
    bench = Bench(
        options.name,
        f"Steps of 1 to 32 tokens as chains and trees: {subject.name}, {options.quant}, {clock}",
        "by bytes, 8 tokens cost 1.02 to 1.2 of one, and a tree what a chain costs",
    )
    times = measure(subject, options)
    report(bench, subject, times)
    return bench.finish(options)


def open_subject(options: argparse.Namespace) -> Subject:
    """Builds the program, its KV filled up to the longest context."""
    path = locate(options.model)
    model = load(path)
    weights: Weights = model.weights
    if options.quant != "none":
        weights = QuantizedWeights(weights, FORMATS.get(options.quant)(FormatOptions()))
    maker = BACKENDS.get("native")(num_threads=options.num_threads, device="cpu", dtype="bfloat16")
    need = maker.need(model.spec, weights, block_size=BLOCK_SIZE, max_batched_tokens=CHUNK)
    program = maker.build(model.spec, weights, KVLayout(num_blocks(), BLOCK_SIZE))
    for start in range(0, max(CONTEXTS), CHUNK):
        batch = step(model.spec, start, min(CHUNK, max(CONTEXTS) - start), is_tree=False, all_rows=False)
        program.step(batch, GREEDY)
    kv_bytes = need.kv_block_bytes / BLOCK_SIZE
    return Subject(Path(path).name, program, model.spec, need.weights_bytes, kv_bytes)


def num_blocks() -> int:
    return (max(CONTEXTS) + max(SIZES)) // BLOCK_SIZE + 1


def step(spec: DecoderSpec, context: int, count: int, *, is_tree: bool, all_rows: bool = True) -> ForwardBatch:
    """Returns a step of `count` tokens after a context: a chain, or a binary tree in the order of its levels."""
    parents = np.array([-1, *((node - 1) // 2 for node in range(1, count))], np.int32)
    depths = np.floor(np.log2(np.arange(1, count + 1))) if is_tree else np.arange(count)
    return ForwardBatch(
        token_ids=np.random.default_rng(count).integers(0, spec.vocab_size, count).astype(np.int32),
        positions=(context + depths).astype(np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([context + count], np.int32),
        block_tables=np.random.default_rng(0).permutation(num_blocks()).astype(np.int32)[None],
        logit_rows=np.arange(0 if all_rows else count - 1, count, dtype=np.int32),
        parents=parents if is_tree else None,
    )


def measure(subject: Subject, options: argparse.Namespace) -> dict[Cell, npt.NDArray[np.float64]]:
    """Returns seconds of each round, [num_rounds]: every kind of step in turn, so that what disturbs one disturbs all."""
    now = time.process_time if options.num_threads == 1 else time.perf_counter
    batches = {cell: step(subject.spec, cell[0], cell[1], is_tree=cell[2]) for cell in cells()}
    times: dict[Cell, list[float]] = {cell: [] for cell in batches}
    with make_progress() as progress:
        for _ in progress.track(range(options.num_rounds), description="rounds"):
            for cell, batch in batches.items():
                started = now()
                subject.program.step(batch, GREEDY)
                times[cell].append(now() - started)
    return {cell: np.array(found) for cell, found in times.items()}


def cells() -> Iterator[Cell]:
    for context in CONTEXTS:
        for size in SIZES:
            yield context, size, False
            if size > 2:  # of two tokens, one is a chain
                yield context, size, True


def report(bench: Bench, subject: Subject, times: dict[Cell, npt.NDArray[np.float64]]) -> None:
    rows = []
    for context in CONTEXTS:
        one = float(np.median(times[context, 1, False]))
        for size in SIZES:
            chain = float(np.median(times[context, size, False]))
            tree = float(np.median(times.get((context, size, True), times[context, size, False])))
            predicted = subject.bytes_of(context, size) / subject.bytes_of(context, 1)
            rows.append((context, size, chain * 1e3, tree * 1e3, predicted, chain / one, tree / chain))
    headers = ("context", "tokens", "chain, ms", "tree, ms", "over one token, by bytes", "over one token", "tree over chain")
    bench.print_rows("Steps", headers, rows)
    bench.check("8 tokens over 1, context 200", next(row[5] for row in rows if row[:2] == (200, 8)), high=1.25)
    bench.check("the dearest tree over a chain of as many tokens", max(row[6] for row in rows), high=1.1)


if __name__ == "__main__":
    sys.exit(main())
