"""M5: what a decode step costs when its sequences share the blocks of a prefix.

Shared blocks are read once, and one product has the rows of all sequences (ChunkAttention, Ye et al. 2024). Beside it stand
sequences with blocks of their own, which read all KV, and sequences that share all blocks but one of each 256 positions: these
are computed one by one, as PagedAttention does, and find most KV in a cache of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Bench, make_parser, make_progress
from cloister.backends.base import GREEDY, ForwardBatch, KVLayout, Program, Weights
from cloister.backends.native.backend import NativeBackend
from cloister.models import load, locate
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights

COUNTS, PREFIXES, KV_DTYPES = (2, 8, 16), (1024, 4096), (None, "int8")
KINDS = ("together", "one by one", "own blocks")
OWN, BLOCK_SIZE, SPLIT, CHUNK = 32, 16, 256, 512
Cell = tuple[int, int, str]
"""Sequences, tokens of the prefix, and one of `KINDS`."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="name or directory")
    parser.add_argument("--quant", default="none", help="format that weights are brought to")
    parser.add_argument("--kernels", help="instruction set; unset, the processor's own")
    parser.add_argument("--num-rounds", type=int, default=15, help="steps of each kind, in turns")
    parser.set_defaults(num_threads=2)
    options = parser.parse_args()
    settings = f"{options.model}, weights {options.quant}, kernels {options.kernels or 'best'}, {options.num_threads} threads"
    bench = Bench(
        "shared_prefix",
        f"Decode steps behind a shared prefix: {settings}",
        "from 8 sequences and 1,024 tokens on, together is faster than one by one and than with blocks of their own",
    )
    report(bench, [measure(options, kv) for kv in KV_DTYPES])
    return bench.finish(options)


def measure(options: argparse.Namespace, kv_dtype: str | None) -> dict[Cell, float]:
    """Returns the median seconds of a step, by cell; cells take turns, so that what disturbs one disturbs all."""
    model = load(locate(options.model))
    weights: Weights = model.weights
    if options.quant != "none":
        weights = QuantizedWeights(weights, FORMATS.get(options.quant)(FormatOptions()))
    maker = NativeBackend(
        num_threads=options.num_threads, device="cpu", dtype="bfloat16", kv_dtype=kv_dtype, kernels=options.kernels
    )
    program = maker.build(model.spec, weights, KVLayout(num_blocks(), BLOCK_SIZE))
    fill(program, model.spec.vocab_size)
    times: dict[Cell, list[float]] = {cell: [] for cell in cells()}
    with make_progress() as progress:
        for _ in progress.track(range(options.num_rounds), description=f"rounds, KV {kv_dtype or 'bfloat16'}"):
            for cell, seconds in times.items():
                batch = plan(cell)
                started = time.perf_counter()
                program.step(batch, GREEDY)
                seconds.append(time.perf_counter() - started)
    return {cell: statistics.median(seconds) for cell, seconds in times.items()}


def cells() -> Iterator[Cell]:
    yield from product(COUNTS, PREFIXES, KINDS)


def blocks_of_each() -> int:
    return (max(PREFIXES) + OWN) // BLOCK_SIZE


def num_blocks() -> int:
    return blocks_of_each() * max(COUNTS)


def tables(count: int, prefix: int, kind: str) -> npt.NDArray[np.int32]:
    """Returns [count, blocks]: each sequence has a run of blocks of its own, of which the first may stand for all."""
    each, shared = blocks_of_each(), prefix // BLOCK_SIZE
    found = np.arange(count * each, dtype=np.int32).reshape(count, each)
    own = found[:, : shared : SPLIT // BLOCK_SIZE].copy()
    if kind != "own blocks":
        found[:, :shared] = found[0, :shared]
    if kind == "one by one":
        found[:, : shared : SPLIT // BLOCK_SIZE] = own
    return np.ascontiguousarray(found[:, : shared + OWN // BLOCK_SIZE])


def plan(cell: Cell) -> ForwardBatch:
    """A decode step: each sequence has a prefix, `OWN` positions behind it, and computes the last of these."""
    count, prefix, kind = cell
    context = prefix + OWN
    return ForwardBatch(
        token_ids=np.arange(100, 100 + count, dtype=np.int32),
        positions=np.full(count, context - 1, np.int32),
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.full(count, context, np.int32),
        block_tables=tables(count, prefix, kind),
        logit_rows=np.arange(count, dtype=np.int32),
    )


def fill(program: Program, vocab_size: int) -> None:
    """Computes the KV of one sequence, and copies its blocks to the others."""
    length = max(PREFIXES)
    table = tables(1, length, "together")
    tokens = np.random.default_rng(0).integers(0, vocab_size, length).astype(np.int32)
    with make_progress() as progress:
        for start in progress.track(range(0, length, CHUNK), description="prefix"):
            batch = ForwardBatch(
                token_ids=tokens[start : start + CHUNK],
                positions=np.arange(start, start + CHUNK, dtype=np.int32),
                query_starts=np.array([0, CHUNK], np.int32),
                context_lens=np.array([start + CHUNK], np.int32),
                block_tables=table,
                logit_rows=np.array([CHUNK - 1], np.int32),
            )
            program.step(batch, GREEDY)
    each = blocks_of_each()
    program.copy_blocks([(block % each, block) for block in range(each, num_blocks())])


def report(bench: Bench, times: list[dict[Cell, float]]) -> None:
    headers = (
        "KV",
        "sequences",
        "prefix",
        *(f"{kind}, ms" for kind in KINDS),
        "one by one over together",
        "own blocks over together",
    )
    rows: list[tuple[object, ...]] = []
    for kv_dtype, found in zip(KV_DTYPES, times, strict=True):
        for count, prefix in product(COUNTS, PREFIXES):
            together, one_by_one, own = (found[count, prefix, kind] for kind in KINDS)
            label = kv_dtype or "bfloat16"
            each = (f"{1e3 * seconds:.2f}" for seconds in (together, one_by_one, own))
            rows.append((label, count, prefix, *each, round(one_by_one / together, 2), round(own / together, 2)))
            if count >= 8:
                bench.check(
                    f"KV {label}, {count} sequences, prefix of {prefix}: one by one over together",
                    one_by_one / together,
                    low=1.0,
                )
    bench.print_rows("Median step", headers, rows)


if __name__ == "__main__":
    sys.exit(main())
