"""M4, RadixAttention: prefix hits on the Mooncake conversation trace, and what they do to the time to first token.

SGLang (Zheng et al., 2024, section 3). First the pure scheduler and cache over the whole trace with a runner that counts,
against an unbounded cache; then the real engine on 500 requests with lengths / 16, one after the other, cache on and off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np

from benchmarks.harness import CONTEXT_TOKENS, MOONCAKE, Bench, make_parser, make_progress, open_engine
from benchmarks.ideal import IdealCache, count_ideal_id_hits
from benchmarks.replay import make_scheduler, replay_one_by_one
from cloister.bench.drive import Drive, Timed, drive, make_request
from cloister.bench.traces import Trace, TraceRow, read_trace
from cloister.bench.workloads import Recipe, WorkItem, build_workload
from cloister.scheduler import SchedulerConfig

PURE_BLOCK_SIZE = 256
SCALE = Fraction(1, 16)
HIT_TOKENS = (0, 33, 128, 256, 512, 1024, CONTEXT_TOKENS)
"""Bounds of the groups of requests by the tokens that were hit; nearly all share the first 32, a system prompt."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One request with the cache and without."""

    num_prompt_tokens: int
    num_hit_tokens: int
    on_s: float
    off_s: float
    same_answer: bool


def main() -> int:
    parser = make_parser(__doc__, traces=(MOONCAKE,))
    parser.add_argument("--num-requests", type=int, default=500, help="requests on the real engine")
    parser.add_argument("--num-pure", type=int, default=None, help="requests through the pure cache; unset, the whole trace")
    options = parser.parse_args()
    bench = Bench(
        "prefix",
        "M4 RadixAttention: prefix hits of the Mooncake conversation trace",
        "the cache hits, token for token, what an unbounded cache hits in the same order; on the engine the time to first "
        "token falls with the share that is hit, and answers are the same with the cache on and off",
    )
    count_hits(bench, read_trace(options.traces / MOONCAKE, options.num_pure), options.seed)
    timings = time_hits(options, read_trace(options.traces / MOONCAKE))
    judge(bench, timings)
    return bench.finish(options)


def count_hits(bench: Bench, trace: Trace, seed: int) -> None:
    """Counts hits of the real scheduler and cache, each prompt before the next one, against the ideal."""
    longest = max(row.num_input_tokens for row in trace.rows) + 2
    num_blocks = sum(row.num_input_tokens // PURE_BLOCK_SIZE + 2 for row in trace.rows)
    config = SchedulerConfig(longest, max_num_seqs=4, prefix_cache=True)
    scheduler = make_scheduler(config, num_blocks, PURE_BLOCK_SIZE)
    cache, ideal = IdealCache(PURE_BLOCK_SIZE), []
    with make_progress() as progress:

        def feed() -> Iterator[Timed]:
            rows = progress.track(trace.rows, description="pure scheduler and cache")
            for number, item in enumerate(make_items(trace, rows, seed)):
                assert isinstance(item.prompt, list)
                ideal.append(cache.take(item.prompt))
                yield Timed(0.0, make_request(number, replace(item, num_output_tokens=1)))

        run = replay_one_by_one(scheduler, feed())
    hits = [record.num_cached_tokens for record in run.recorder.records]
    num_tokens = sum(row.num_input_tokens for row in trace.rows)
    id_hits, num_ids = count_ideal_id_hits(row.hash_ids for row in trace.rows)
    headers = ("requests", "prompt tokens", "hit tokens", "ideal", "share", "ideal share of the trace's own ids")
    shares = (f"{sum(hits) / num_tokens:.2%}", f"{id_hits / num_ids:.2%}")
    bench.print_rows("Pure cache", headers, [(len(hits), num_tokens, sum(hits), sum(ideal), *shares)])
    bench.check_true("every request hits exactly what the ideal cache hits", hits == ideal)
    bench.check("tokens computed and hit, over all prompt tokens", (run.num_computed + sum(hits)) / num_tokens, low=1, high=1)


def make_items(trace: Trace, rows: Iterable[TraceRow], seed: int) -> Iterator[WorkItem]:
    """Yields prompts one by one: all of them at once would fill the memory."""
    for row in rows:
        yield from build_workload(Trace(trace.name, (row,)), Recipe("burst", seed=seed)).items


def time_hits(options: argparse.Namespace, trace: Trace) -> list[Timing]:
    """Times the first requests on the engine, one after the other, with the cache and without."""
    recipe = Recipe("burst", num_requests=options.num_requests, scale=SCALE, max_model_len=CONTEXT_TOKENS, seed=options.seed)
    items = build_workload(trace, recipe).items
    on, off = open_engine(options, prefix_cache=True, kv_memory_mb=2048), open_engine(options, kv_memory_mb=64)
    for engine in (on, off):
        for number, length in enumerate((64, 512, 2048)):
            drive(engine, [Timed(0.0, make_request(number, WorkItem(0.0, [5] * length, length, 2), "warm-up"))])
    timings = []
    with make_progress() as progress:
        for number, item in enumerate(progress.track(items, description="engines, cache on and off")):
            # one after the other on both engines, so that whatever else the machine does hits both alike
            timings.append(compare(*(drive(engine, [Timed(0.0, make_request(number, item))]) for engine in (on, off))))
    return timings


def compare(on: Drive, off: Drive) -> Timing:
    """Returns what the cache did to one request."""
    (first,), (second,) = on.recorder.records, off.recorder.records
    same = on.token_ids == off.token_ids
    return Timing(first.num_input_tokens, first.num_cached_tokens, first.ttft_s, second.ttft_s, same_answer=same)


def judge(bench: Bench, timings: Sequence[Timing]) -> None:
    """Groups the requests by the tokens that were hit and checks that more hits mean less waiting."""
    rows, ratios, saved = [], [], []
    for low, high in pairwise(HIT_TOKENS):
        group = [t for t in timings if low <= t.num_hit_tokens < high]
        if len(group) >= 5:
            on_s, off_s = (float(np.median(times)) for times in ([t.on_s for t in group], [t.off_s for t in group]))
            ratios.append(float(np.median([t.on_s / t.off_s for t in group])))
            saved.append(float(np.median([t.off_s - t.on_s for t in group])) * 1e3)
            rows.append((f"{low:,} to {high - 1:,}", len(group), on_s * 1e3, off_s * 1e3, ratios[-1], saved[-1]))
    headers = ("tokens hit", "requests", "TTFT on, ms", "TTFT off, ms", "median of on / off", "median saved, ms")
    bench.print_rows("Engine", headers, rows)
    bench.check_true("the more tokens are hit, the more of the time to first token is saved", saved == sorted(saved))
    bench.check("TTFT on / off where most is hit", ratios[-1], high=0.6)
    bench.check("TTFT on / off where least is hit", ratios[0], high=1.1)
    num_same = sum(t.same_answer for t in timings)
    bench.check_true(f"{num_same} of {len(timings)} answers are equal with the cache on and off", num_same == len(timings))


if __name__ == "__main__":
    sys.exit(main())
