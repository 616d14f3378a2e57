"""M2: steps that read KV through block tables, and steps that read it at addresses in a row (vAttention, Prabhu et al. 2025).

Blocks lie in a shuffled order, so each is a mapping of its own, or one after the other, so a sequence is one mapping. The model
is as wide as SmolLM2-135M and has 4 layers of random weights; KV is not computed, but written. Times are of the processor, on
one thread: a busy machine disturbs them little.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bench, make_parser
from cloister.backends import BACKENDS
from cloister.backends.base import GREEDY, LOGITS, ForwardBatch, IntArray, KVLayout, Program
from cloister.backends.ranges import RangeLayout
from tests.driving import RandomWeights, make_spec

NUM_LAYERS, BLOCK_SIZE, CHUNK = 4, 16, 256
SPEC = make_spec(hidden=576, intermediate=1536, heads=(9, 3), head_dim=64, num_layers=NUM_LAYERS, vocab=4096)
CONTEXTS, COUNTS, ORDERS, WORK = (256, 4096, 16384), (1, 16), ("shuffled", "in order"), ("decode", "prefill")
KINDS: dict[str, dict[str, Any]] = {
    "native": {"dtype": "bfloat16"},
    "native int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "torch": {"dtype": "float32"},
}
Cell = tuple[str, int, int, str]
"""Work, sequences, context and order of blocks."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="back ends and KV formats")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="positions of each sequence")
    parser.add_argument("--num-rounds", type=int, default=7, help="steps of each kind, in turns")
    options = parser.parse_args()
    bench = Bench(
        "kv_layouts",
        "KV through block tables and at addresses in a row: one thread",
        "native kernels gain nothing, as they never copy blocks that they read once; torch gains the copy; a mapping takes "
        "microseconds, and its pages as much again when they are first read",
    )
    measure_mappings(bench)
    for kind in options.kinds:
        compare(bench, kind, options)
    return bench.finish(options)


def make_program(kind: str, count: int, context: int, *, ranged: bool) -> Program:
    each = context // BLOCK_SIZE
    layout = KVLayout(count * each, BLOCK_SIZE)
    if ranged:
        layout = replace(layout, ranges=RangeLayout(count, each))
    maker = BACKENDS.get(kind.split()[0])(num_threads=1, device="cpu", **KINDS[kind])
    program = maker.build(SPEC, RandomWeights(SPEC), layout)
    content = bytes([0x3C]) * len(program.export_blocks([0])[0])  # a small number in every format
    for block in range(count * each):
        program.import_blocks([block], [content])
    return program


def place(program: Program, count: int, context: int, order: str) -> IntArray:
    """Returns the block tables of a step, [count, num_entries]; maps ranges where the program has them."""
    each = context // BLOCK_SIZE
    blocks = np.arange(count * each, dtype=np.int32)
    if order == "shuffled":
        np.random.default_rng(1).shuffle(blocks)
    tables = blocks.reshape(count, each)
    if program.ranges is None:
        return tables
    for slot in range(count):
        program.ranges.release(slot)
        program.ranges.map(slot, 0, tables[slot].tolist())
    firsts = np.array([program.ranges.first_block(slot) for slot in range(count)], np.int32)
    return (firsts[:, None] + np.arange(each)).astype(np.int32)


def plan(work: str, tables: IntArray, count: int, context: int) -> ForwardBatch:
    """A step of all sequences at the end of their context: one token each, or a chunk together."""
    size = 1 if work == "decode" else min(context, CHUNK // count)
    return ForwardBatch(
        token_ids=np.arange(count * size, dtype=np.int32) % SPEC.vocab_size,
        positions=np.tile(np.arange(context - size, context, dtype=np.int32), count),
        query_starts=np.arange(0, count * size + 1, size, dtype=np.int32),
        context_lens=np.full(count, context, np.int32),
        block_tables=tables,
        logit_rows=np.arange(size - 1, count * size, size, dtype=np.int32),
    )


def compare(bench: Bench, kind: str, options: argparse.Namespace) -> None:
    wants = LOGITS if kind == "torch" else GREEDY
    rows = []
    for count, context in product(COUNTS, options.contexts):
        programs = [make_program(kind, count, context, ranged=ranged) for ranged in (False, True)]
        for order, work in product(ORDERS, WORK):
            batches = [plan(work, place(program, count, context, order), count, context) for program in programs]
            found: list[list[float]] = [[], []]
            for _ in range(options.num_rounds + 1):
                for program, batch, seconds in zip(programs, batches, found, strict=True):
                    started = time.thread_time()
                    program.step(batch, wants)
                    seconds.append(time.thread_time() - started)
            paged, virtual = ([1e3 * second for second in seconds] for seconds in found)
            ratio = statistics.median(a / b for a, b in zip(paged[1:], virtual[1:], strict=True))
            rows.append((work, count, context, order, min(paged[1:]), min(virtual[1:]), virtual[0], round(ratio, 2)))
        del programs
        gc.collect()
    headers = ("work", "sequences", "context", "blocks", "paged, ms", "virtual, ms", "first virtual, ms", "paged over virtual")
    bench.print_rows(f"Steps, {kind}", headers, rows)


def measure_mappings(bench: Bench) -> None:
    """What mapping takes, for a block of each size."""
    headers = ("block, KiB", "what", "mappings", "µs", "µs a mapping", "first reads, µs a page")
    rows = [row for layers in (NUM_LAYERS, 30) for row in _mapping_rows(layers)]
    bench.print_rows("Mappings", headers, rows)
    held = int(Path("/proc/sys/vm/max_map_count").read_text())
    bench.print_rows("Addresses", ("system's limit of mappings", "blocks of 16 sequences of 16,384"), [(held, 16 * 1024)])


def _mapping_rows(num_layers: int) -> Iterator[tuple[object, ...]]:
    from cloister.backends.ranges import KVRanges

    stride = num_layers * 2 * 3 * 64 * 2 * BLOCK_SIZE
    made = KVRanges(RangeLayout(2, 1024), 1024, stride)
    made.memory[:1024, ::4096] = 1
    shuffled = np.random.default_rng(1).permutation(1024).tolist()
    for what, table, first in (
        ("a block of a decode", shuffled[:101], 100),
        ("512 tokens, in order", list(range(32)), 0),
        ("512 tokens, shuffled", shuffled[:32], 0),
        ("a hit of 4,096 tokens, shuffled", shuffled[:256], 0),
        ("16,384 tokens, shuffled", shuffled, 0),
    ):
        times, reads, num_mappings = [], [], 0
        for _ in range(15):
            made.release(0)
            if first:
                made.map(0, 0, table[:first])
            before = made.num_mappings
            started = time.thread_time()
            made.map(0, first, table)
            times.append(1e6 * (time.thread_time() - started))
            num_mappings = made.num_mappings - before
            start = made.first_block(0)
            pages = made.memory[start + first : start + len(table), ::4096]
            started = time.thread_time()
            pages.sum()
            cold = time.thread_time() - started
            started = time.thread_time()
            pages.sum()
            reads.append(1e6 * (cold - (time.thread_time() - started)) / pages.size)
        yield (stride >> 10, what, num_mappings, min(times), min(times) / num_mappings, statistics.median(reads))
    made.map(0, 0, shuffled)
    started = time.thread_time()
    made.release(0)
    yield (stride >> 10, "the end of 16,384 tokens", -1024, 1e6 * (time.thread_time() - started), 0.0, 0.0)


if __name__ == "__main__":
    sys.exit(main())
