"""B1, Orca: iteration-level against request-level batching on the same engine.

Orca (Yu et al., OSDI 2022, section 3): requests join and leave at every step, so that no short answer waits for a long one.
One that joins brings its whole prompt, as in Orca; the stall-free budget that serves by default (Sarathi-Serve, B2) is beside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from benchmarks.harness import AZURE, CONTEXT_TOKENS, Bench, find_scale, make_parser, make_progress, open_engine, read_azure
from benchmarks.replay import StepCosts, make_scheduler, replay
from cloister.bench.drive import Timed, drive, make_requests
from cloister.bench.recorder import EventRecorder
from cloister.bench.workloads import Recipe, WorkItem, build_workload, make_tokens
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.types.config import EngineConfig
from cloister.types.events import Ended, Event

BATCH = 16
PROMPT_TOKENS = 32
BLOCK_SIZE = 16
EAGER = 1e6
"""A `max_stall` that bounds nothing."""
STALL_FREE = EngineConfig().max_stall
RUNS = {"static": ("static", EAGER), "fcfs": ("fcfs", EAGER), "fcfs, stall-free": ("fcfs", STALL_FREE)}
"""Label -> scheduler and `max_stall`."""


def main() -> int:
    parser = make_parser(__doc__, traces=(AZURE,))
    parser.add_argument("--num-requests", type=int, default=480, help="requests with heavy-tailed answers")
    parser.add_argument("--num-azure", type=int, default=96, help="requests with Azure lengths")
    options = parser.parse_args()
    bench = Bench(
        "orca",
        "B1 Orca: iteration-level batching",
        "static batches last as long as their longest answer, so fcfs gains at least 2x on heavy tails; on Azure lengths "
        "the gain is what the two schedules cost at the measured step cost, and we reach 0.9 of it",
    )
    heavy = make_heavy_tail(options)
    azure = make_azure(options)
    runs = {(name, s): run(options, s, work, name) for name, work in (("heavy", heavy), ("azure", azure)) for s in RUNS}
    seconds = {key: span(recorder) for key, recorder in runs.items()}
    rows = []
    for name, work in (("heavy", heavy), ("azure", azure)):
        costs = StepCosts.fit(runs[name, "static"].steps)
        bench.figures[f"step costs, {name}"] = asdict(costs)
        predicted = {s: span(replay_run(s, work, costs)) for s in RUNS}
        rows += [describe(name, s, runs[name, s], seconds[name, s], predicted[s]) for s in RUNS]
        ratio, expected = (t["static"] / t["fcfs"] for t in ({s: seconds[name, s] for s in RUNS}, predicted))
        bench.figures[f"gain, {name}"] = {"measured": ratio, "predicted by step cost": expected}
        if name == "heavy":
            bench.check("gain on heavy-tailed answers", ratio, low=2.0)
        bench.check(f"gain on {name} lengths ({ratio:.2f}x) over its prediction ({expected:.2f}x)", ratio / expected, low=0.9)
    headers = ("lengths", "scheduler", "seconds", "in steps", "predicted", "steps", "tokens /s", "samples a step")
    bench.print_rows("Runs", headers, rows)
    bench.check_true("a request that arrives mid-run gets its first token before the running ones end", joins(options))
    return bench.finish(options)


def heavy_tailed_lengths(low: int, high: int, num: int, seed: int, shape: float = 1.0) -> list[int]:
    """Draws lengths from a Pareto distribution cut to [low, high], by inversion. Many short ones, a few very long."""
    u = np.random.default_rng([seed, 3]).random(num)
    ratio = (low / high) ** shape
    lengths = low * (1 - u * (1 - ratio)) ** (-1 / shape)
    return [int(length) for length in np.clip(np.rint(lengths), low, high)]


def make_heavy_tail(options: argparse.Namespace) -> list[Timed]:
    """Returns a burst of requests with prompts of 32 and Pareto answers of 8 to 1024 tokens."""
    lengths = heavy_tailed_lengths(8, 1024, options.num_requests, options.seed)
    items = [
        WorkItem(0.0, make_tokens((options.seed, n), PROMPT_TOKENS, 2048), PROMPT_TOKENS, length)
        for n, length in enumerate(lengths)
    ]
    return make_requests(items)


def make_azure(options: argparse.Namespace) -> list[Timed]:
    """Returns a burst of requests with Azure conversation lengths, scaled so that every row of the trace fits."""
    trace = read_azure(options)
    scale = find_scale(trace.rows, CONTEXT_TOKENS)
    recipe = Recipe("burst", num_requests=options.num_azure, scale=scale, seed=options.seed)
    return make_requests(build_workload(trace, recipe).items)


def run(options: argparse.Namespace, label: str, requests: Sequence[Timed], name: str) -> EventRecorder:
    """Runs the requests on a fresh engine, after a warm-up that its steps do not count."""
    scheduler, stall = RUNS[label]
    engine = open_engine(
        options, scheduler=scheduler, max_stall=stall, stall_floor_ms=0.0, max_num_seqs=BATCH, block_size=BLOCK_SIZE
    )
    warmup = [WorkItem(0.0, make_tokens((9, n), 64, 2048), 64, 24) for n in range(BATCH)]
    drive(engine, make_requests(warmup, "warm-up"))
    with make_progress() as progress:
        task = progress.add_task(f"{name}: {label}", total=len(requests))

        def listen(event: Event) -> None:
            if isinstance(event, Ended):
                progress.advance(task)

        return drive(engine, requests, listeners=[listen]).recorder


def replay_run(label: str, requests: Sequence[Timed], costs: StepCosts) -> EventRecorder:
    """Replays the same requests through the same scheduler, each step taking what the costs say."""
    scheduler, stall = RUNS[label]
    config = SchedulerConfig(
        CONTEXT_TOKENS, max_num_seqs=BATCH, policy=scheduler, budget=BudgetConfig(max_stall=stall), prefix_cache=False
    )
    return replay(make_scheduler(config, 2 * BATCH * CONTEXT_TOKENS // BLOCK_SIZE, BLOCK_SIZE), requests, costs).recorder


def span(recorder: EventRecorder) -> float:
    """Seconds from the first arrival to the last token."""
    return max(record.end_s for record in recorder.records)


def describe(name: str, scheduler: str, recorder: EventRecorder, seconds: float, predicted_s: float) -> list[object]:
    num_output = sum(record.num_output_tokens for record in recorder.records)
    num_samples = sum(step.num_samples for step in recorder.steps) / len(recorder.steps)
    step_s = sum(step.elapsed_s for step in recorder.steps)
    return [name, scheduler, seconds, step_s, predicted_s, len(recorder.steps), num_output / seconds, num_samples]


def joins(options: argparse.Namespace) -> bool:
    """True if a request that arrives while others run has its first token before the first of them ends."""
    engine = open_engine(options, scheduler="fcfs", max_num_seqs=BATCH)
    running = [WorkItem(0.0, make_tokens((1, n), PROMPT_TOKENS, 2048), PROMPT_TOKENS, 400) for n in range(4)]
    late = WorkItem(0.5, make_tokens((2,), PROMPT_TOKENS, 2048), PROMPT_TOKENS, 8)
    records = drive(engine, make_requests([*running, late])).recorder.records
    return records[4].due_s + records[4].ttft_s < min(record.end_s for record in records[:4])


if __name__ == "__main__":
    sys.exit(main())
