"""What the scheduler costs: plan and commit with 256 running sequences, in microseconds and as a share of a step."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.harness import CONTEXT_TOKENS, Bench, make_parser, open_engine
from benchmarks.replay import CountingRunner, make_scheduler
from cloister.bench.drive import drive, make_requests
from cloister.bench.plots import BLUE, ORANGE, draw
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.types.step import StepPlan

NUM_SEQUENCES = (1, 16, 64, 256)
PROMPT_TOKENS = 64
NUM_STEPS = 300
EAGER = 1e6
"""A `max_stall` that lets every prompt in at once: what is timed here are the decode steps after it."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--step-tokens", type=int, default=40, help="decode steps of the real engine to time")
    options = parser.parse_args()
    bench = Bench(
        "scheduler_cost",
        "Scheduler: plan + commit",
        "some microseconds for each running sequence, so about 2 ms for 256 and a few percent of the step that computes them",
    )
    costs = {num: measure(num) for num in NUM_SEQUENCES}
    step_s = measure_step(options, max(NUM_SEQUENCES))
    rows = []
    for num, (plan_s, commit_s) in costs.items():
        plan, commit = (float(np.median(times)) * 1e6 for times in (plan_s, commit_s))
        rows.append((num, plan, commit, plan + commit, (plan + commit) / num))
    bench.print_rows("Cost", ("running", "plan, us", "commit, us", "both, us", "us a sequence"), rows)
    share = rows[-1][3] / 1e6 / (step_s + rows[-1][3] / 1e6)
    bench.print_rows(
        "Share", ("running", "step, ms", "plan + commit, ms", "share"), [(256, step_s * 1e3, rows[-1][3] / 1e3, share)]
    )
    bench.check("share of a step with 256 sequences", share, high=0.1)
    bench.check("microseconds a sequence, 256 over 16 running", rows[-1][4] / rows[1][4], high=2.0)
    with draw(bench.picture(options), bench.title, size=(6.4, 4)) as (axes,):
        axes.plot(NUM_SEQUENCES, [row[1] for row in rows], "o-", color=BLUE, label="plan")
        axes.plot(NUM_SEQUENCES, [row[2] for row in rows], "s-", color=ORANGE, label="commit")
        axes.set_xlabel("running sequences, one token each")
        axes.set_ylabel("time, us (median)")
        axes.set_ylim(bottom=0)
        axes.legend()
    return bench.finish(options)


def measure(num_sequences: int) -> tuple[list[float], list[float]]:
    """Returns the times of plans and of commits while every sequence decodes, in seconds."""
    config = SchedulerConfig(
        CONTEXT_TOKENS, max_num_seqs=num_sequences, budget=BudgetConfig(max_stall=EAGER), prefix_cache=True
    )
    scheduler = make_scheduler(config, num_sequences * 64, 16)
    runner, plans, commits = CountingRunner(), [], []
    for timed in make_requests(items(num_sequences, NUM_STEPS + 50)):
        scheduler.add(timed.request, 0.0)
    while scheduler.requests:
        plan_s, plan = clock(partial(scheduler.plan, 0.0))
        assert isinstance(plan, StepPlan)
        result = runner.run(plan)
        result.elapsed_s = 0.01
        commit_s, _ = clock(partial(scheduler.commit, result, {}, 0.0))
        if plan.num_tokens == num_sequences and not plan.arrivals:
            plans.append(plan_s)
            commits.append(commit_s)
    return plans, commits


def measure_step(options: argparse.Namespace, num_sequences: int) -> float:
    """Returns the median time of a real decode step of that many sequences, in seconds."""
    engine = open_engine(options, max_num_seqs=num_sequences, max_batched_tokens=4096, max_stall=EAGER)
    steps = drive(engine, make_requests(items(num_sequences, options.step_tokens))).recorder.steps
    return float(np.median([step.elapsed_s for step in steps if step.num_tokens == num_sequences]))


def items(num: int, num_output: int) -> list[WorkItem]:
    return [WorkItem(0.0, make_tokens((n,), PROMPT_TOKENS, 2048), PROMPT_TOKENS, num_output) for n in range(num)]


def clock(work: Callable[[], object]) -> tuple[float, object]:
    """Returns how long `work` took, in seconds, and what it returned."""
    start_s = time.perf_counter()
    value = work()
    return time.perf_counter() - start_s, value


if __name__ == "__main__":
    sys.exit(main())
