"""M1, PagedAttention: how much KV memory is allocated and holds nothing, at every step, with blocks of 16.

vLLM (Kwon et al., SOSP 2023, section 4): only a sequence's last block can have unused slots. Pure: the real scheduler and pool
with a runner that counts; Azure lengths and arrivals.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.harness import CONTEXT_TOKENS, Bench, find_scale, make_parser, make_progress, read_azure
from benchmarks.replay import StepCosts, make_scheduler, replay
from cloister.bench.drive import make_requests
from cloister.bench.plots import BLUE, GREY, ORANGE, draw
from cloister.bench.workloads import Recipe, build_workload
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.step import StepPlan

BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
COSTS = StepCosts(step_s=0.02, token_s=5e-5, sample_s=2e-4, key_s=1e-8)
"""Made-up costs of a step; they only decide how many sequences run side by side."""


def count_unused_slots(scheduler: Scheduler) -> int:
    """Returns the KV positions that are allocated to running sequences and hold nothing: the waste of paging."""
    held: dict[int, int] = {}
    for request in scheduler.requests.values():
        for sequence in request.sequences:
            for i, block in enumerate(sequence.table.blocks if sequence.table is not None else ()):
                filled = min(BLOCK_SIZE, max(0, sequence.num_planned - i * BLOCK_SIZE))
                held[block] = max(held.get(block, 0), filled)
    return sum(BLOCK_SIZE - filled for filled in held.values())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-requests", type=int, default=2000, help="requests of the trace")
    options = parser.parse_args()
    bench = Bench(
        "paging",
        "M1 PagedAttention: unused slots of allocated KV blocks",
        "half a block of each running sequence is unused, 8 of some 700 slots, so little over 1% of what is allocated; "
        "reserving the context window would leave most of it empty",
    )
    trace = read_azure(options)
    recipe = Recipe(num_requests=options.num_requests, scale=find_scale(trace.rows, CONTEXT_TOKENS), seed=options.seed)
    requests = make_requests(build_workload(trace, recipe).items)
    config = SchedulerConfig(CONTEXT_TOKENS, max_num_seqs=MAX_NUM_SEQS, budget=BudgetConfig(), prefix_cache=False)
    scheduler = make_scheduler(config, MAX_NUM_SEQS * CONTEXT_TOKENS // BLOCK_SIZE // 4, BLOCK_SIZE)
    samples: list[tuple[float, int, int, int]] = []
    with make_progress() as progress:
        task = progress.add_task("requests", total=len(requests))

        def sample(scheduler: Scheduler, _: StepPlan) -> None:
            allocated = scheduler.pool.num_used * BLOCK_SIZE
            if scheduler.num_running:
                samples.append((float(len(samples)), count_unused_slots(scheduler), allocated, scheduler.num_running))
            progress.update(task, completed=len(requests) - scheduler.num_waiting - scheduler.num_running)

        run = replay(scheduler, requests, COSTS, on_step=sample)
    scheduler.pool.check()
    table = np.array(samples)
    waste = table[:, 1] / table[:, 2]
    overall = float(table[:, 1].sum() / table[:, 2].sum())
    reserved = table[:, 3] * CONTEXT_TOKENS
    contiguous = float(1 - (table[:, 2] - table[:, 1]).sum() / reserved.sum())
    of_pool = table[:, 1] / (scheduler.pool.num_total * BLOCK_SIZE)
    headers = ("steps", "mean running", "waste overall", "waste, mean", "P99", "max", "max of the pool", "if reserved")
    row = [
        f"{share:.2%}" for share in (overall, waste.mean(), np.percentile(waste, 99), waste.max(), of_pool.max(), contiguous)
    ]
    bench.print_rows("Waste", headers, [(len(samples), float(table[:, 3].mean()), *row)])
    bench.check("unused slots over allocated slots, summed over every step", overall, high=0.04)
    bench.check("mean over the steps", float(waste.mean()), high=0.04)
    bench.check("unused slots over all KV memory, at the worst step", float(of_pool.max()), high=0.04)
    bench.check_true("every request was answered", all(r.ok for r in run.recorder.records))
    bench.check("blocks in use at the end", scheduler.pool.num_used, high=0)
    with draw(bench.picture(options), bench.title, size=(8, 4.2)) as (axes,):
        axes.plot(table[:, 0], waste * 100, color=BLUE, linewidth=0.7, label=f"each step (overall {overall:.2%})")
        axes.axhline(4, color=ORANGE, linestyle="--", label="bound: 4%")
        axes.set_xlabel("step")
        axes.set_ylabel("allocated slots that hold nothing, %")
        axes.set_ylim(0, max(5, waste.max() * 110))
        axes.legend(loc="upper left")
        other = axes.twinx()
        other.plot(table[:, 0], table[:, 3], color=GREY, linewidth=0.6, alpha=0.6)
        other.set_ylabel("sequences running", color=GREY)
        other.grid(False)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
