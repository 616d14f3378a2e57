"""B5, B6, B7, B9: scheduling policies on loads with a heavy tail and in bursts, below and above what the engine can do.

Virtual time: the scheduler is the server's; a step takes `--slowness` times what a step of the embedded model was measured to
take in a run before, so that readers' seconds matter, as with a model so many times as large. Either slots are short, or KV
memory is; then evicted KV is lost, or read back from a tier, as many times slower than `host` was measured to be. `--real` adds
a short run of every policy on the engine itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from pathlib import Path

import msgspec

from benchmarks.harness import ROOT, Bench, make_parser, open_engine
from benchmarks.replay import CountingRunner, Replay, StepCosts, VirtualTier, make_scheduler, replay
from cloister.bench.drive import Timed, drive, make_requests
from cloister.bench.plots import BLUE, GREEN, GREY, ORANGE, RED, draw
from cloister.bench.recorder import RequestRecord
from cloister.bench.traces import read_trace
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.scheduler.policies.qoe import measure_qoe
from cloister.types.events import KVLoaded

POLICIES = ("fcfs", "mlfq", "cfs", "reorder", "qoe")
COLOURS = dict(zip(POLICIES, (GREY, BLUE, GREEN, ORANGE, RED), strict=True))
LOADS = (0.7, 0.9, 1.1)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
NUM_SLOTS = 8
"""Sequences at once where slots are short."""
MAX_STEP_TOKENS = 1024
BURSTY = "azure_llm_2023_code.csv.gz"
"""Whose arrivals come in bursts: their gaps deviate by 15 times their mean (CC-BY 4.0, Patel et al., ISCA 2024)."""
AT_ONCE = 8
"""Requests of mean length for which there is KV memory."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured.

    Attributes:
        steps: times of steps.
        block_bytes: of a block of KV.
        byte_s: to read a byte from the tier.
    """

    steps: StepCosts
    block_bytes: int
    byte_s: float

    def slowed(self, slowness: float) -> Costs:
        """Returns the costs of a model so many times as large."""
        steps = StepCosts(**{name: slowness * seconds for name, seconds in asdict(self.steps).items()})
        return Costs(steps, self.block_bytes, slowness * self.byte_s)


def read_costs(results: Path) -> Costs:
    """Returns the costs that an earlier run measured, from its results."""
    found = json.loads(results.read_text(encoding="utf-8"))["figures"]["measured costs"]
    return msgspec.convert(found, Costs)


def measure_costs(options: argparse.Namespace) -> Costs:
    """Runs requests of many lengths on an engine whose KV memory is too small for all of them, with a tier."""
    engine = open_engine(
        options, prefix_cache=True, kv_memory_mb=4.0, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS,
        max_batched_tokens=MAX_STEP_TOKENS,
    )  # fmt: skip
    engine.open_kv_tiers("host:256M")
    draws = random.Random(options.seed)
    lengths = [(draws.choice((16, 64, 256, 1024)), draws.randrange(8, 64)) for _ in range(60)]
    items = [WorkItem(0.05 * i, make_tokens((4, i), p, 2048), p, n) for i, (p, n) in enumerate(lengths)]
    steps, loads = [], []
    for turn in range(2):  # the second time much of it comes from the tier
        run = drive(engine, make_requests(items, f"costs-{turn}"), listeners=[lambda event: loads.append(event)])
        steps += run.recorder.steps
    read = [event for event in loads if isinstance(event, KVLoaded) and event.num_bytes]
    if not read:
        raise SystemExit("nothing was read from the tier; its speed is unknown")
    assert engine._kv_blocks is not None
    block_bytes = engine._kv_blocks.form.sizes[0]
    return Costs(StepCosts.fit(steps), block_bytes, statistics.median(event.elapsed_s / event.num_bytes for event in read))


def draw_heavy_tailed(num: int, seed: int, times: Sequence[float] | None = None) -> list[WorkItem]:
    """Returns requests with short and long prompts, and answers whose lengths have a heavy tail (Pareto, exponent 1.1).

    Args:
        times: when they arrive; None: in a Poisson process of one a second.
    """
    draws = random.Random(seed)
    times = list(accumulate(draws.expovariate(1.0) for _ in range(num))) if times is None else times[:num]
    lengths = [(draws.choice((16, 64, 256)), min(1024, int(16 * draws.paretovariate(1.1)))) for _ in range(num)]
    return [
        WorkItem(at_s, make_tokens((5, seed, i), p, 2048), p, n)
        for i, (at_s, (p, n)) in enumerate(zip(times, lengths, strict=True))
    ]


def at_rate(items: Sequence[WorkItem], rate: float) -> list[Timed]:
    """Returns the requests, at so many a second on average."""
    stretch = (len(items) - 1) / rate / (items[-1].arrival_s - items[0].arrival_s)
    requests = make_requests(items)
    return [
        Timed((timed.due_s - items[0].arrival_s) * stretch, msgspec.structs.replace(timed.request, timeout_s=1e6))
        for timed in requests
    ]


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and an engine that lacks one thing.

    Attributes:
        below: where evicted KV goes.
    """

    name: str
    costs: Costs
    items: Sequence[WorkItem]
    max_num_seqs: int
    below: str = "none"

    @property
    def num_blocks(self) -> int:
        """KV blocks: if slots are short, for the longest requests in all; else for `AT_ONCE` of mean length, and for the
        longest."""
        if self.max_num_seqs == NUM_SLOTS:
            return 2 * NUM_SLOTS * MAX_MODEL_LEN // BLOCK_SIZE
        lengths = [item.num_input_tokens + item.num_output_tokens for item in self.items]
        return -(-max(int(AT_ONCE * statistics.fmean(lengths)), MAX_MODEL_LEN) // BLOCK_SIZE)

    def run(self, policy: str, requests: Sequence[Timed]) -> Replay:
        """Runs requests under a policy."""
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=self.max_num_seqs, policy=policy,
            budget=BudgetConfig(MAX_STEP_TOKENS, floor_s=0.045),
        )  # fmt: skip
        scheduler, runner = make_scheduler(config, self.num_blocks, BLOCK_SIZE), CountingRunner()
        tier = None
        if self.below == "host":
            tier = VirtualTier(scheduler, runner, self.costs.block_bytes, 20 * self.num_blocks, self.costs.byte_s)
        return replay(scheduler, requests, self.costs.steps, runner=runner, tier=tier)

    def find_capacity(self) -> float:
        """Returns requests per second under `fcfs` if all are there at once."""
        requests = [Timed(0.0, timed.request) for timed in at_rate(self.items, 1.0)]
        return len(requests) / self.run("fcfs", requests).clock.now()


def list_cases(options: argparse.Namespace, costs: Costs) -> list[Case]:
    """Returns what is run in virtual time."""
    heavy = draw_heavy_tailed(options.num_requests, options.seed)
    times = [row.arrival_s for row in read_trace(options.traces / BURSTY).rows if row.arrival_s is not None]
    bursts = draw_heavy_tailed(options.num_requests, options.seed, times)
    return [
        Case("heavy tail, 8 slots", costs, heavy, NUM_SLOTS),
        Case("heavy tail, short of KV", costs, heavy, MAX_NUM_SEQS),
        Case("heavy tail, short of KV, tier", costs, heavy, MAX_NUM_SEQS, "host"),
        Case("bursts, 8 slots", costs, bursts, NUM_SLOTS),
        Case("bursts, short of KV", costs, bursts, MAX_NUM_SEQS),
        Case("bursts, short of KV, tier", costs, bursts, MAX_NUM_SEQS, "host"),
    ]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run; times in seconds.

    Attributes:
        longest_wait_s: longest time without a token, of any request.
        again: positions computed again, over those that were needed.
    """

    mean_s: float
    p99_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    qoe: float
    occupancy: float
    longest_wait_s: float
    num_preemptions: int
    again: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord], run: Replay | None = None) -> Figures:
        """Returns the figures of records, and of what only a virtual run knows."""
        ends, firsts = sorted(r.e2e_s for r in records), sorted(r.ttft_s for r in records)
        needed = sum(r.num_input_tokens - r.num_cached_tokens + r.num_output_tokens - 1 for r in records)
        return cls(
            mean_s=statistics.fmean(ends),
            p99_s=ends[int(0.99 * len(ends))],
            ttft_mean_s=statistics.fmean(firsts),
            ttft_p99_s=firsts[int(0.99 * len(firsts))],
            qoe=statistics.fmean(measure_qoe(r.due_s, r.deliveries) for r in records),
            occupancy=run.occupancy if run else 0.0,
            longest_wait_s=max(max(r.ttft_s, *r.gaps_s, 0.0) for r in records),
            num_preemptions=sum(run.preemptions.values()) if run else 0,
            again=run.num_computed / needed - 1 if run else 0.0,
        )


HEADERS = (
    "policy", "mean s", "P99 s", "TTFT mean s", "TTFT P99 s", "QoE", "occupancy", "longest wait s", "preemptions",
    "computed again",
)  # fmt: skip
Found = dict[tuple[str, float, str], Figures]
"""By case, load and policy."""


def run_virtually(bench: Bench, cases: Sequence[Case]) -> Found:
    """Runs every policy at every load, and prints the figures."""
    found: Found = {}
    for case in cases:
        capacity = case.find_capacity()
        for load in LOADS:
            rows: list[tuple[object, ...]] = []
            for policy in POLICIES:
                run = case.run(policy, at_rate(case.items, load * capacity))
                figures = found[case.name, load, policy] = Figures.of(run.recorder.records, run)
                rows.append((policy, *asdict(figures).values()))
            title = f"{case.name}: {load} of {capacity:.3g} requests/s, {case.num_blocks} blocks"
            bench.print_rows(title, HEADERS, rows)
    return found


def judge(bench: Bench, found: Found, cases: Sequence[Case]) -> None:
    """Compares what each paper promises with `fcfs`."""
    for name, load in product((case.name for case in cases), (0.9, 1.1)):
        at = {policy: found[name, load, policy] for policy in POLICIES}
        fcfs, where = at["fcfs"], f"{name}, {load}"
        bench.check(f"{where}: mlfq, mean completion over fcfs", at["mlfq"].mean_s / fcfs.mean_s, high=1.0)
        bench.check(f"{where}: cfs, TTFT P99 over fcfs", at["cfs"].ttft_p99_s / fcfs.ttft_p99_s, high=0.5)
        bench.check(f"{where}: qoe, QoE over fcfs", at["qoe"].qoe / fcfs.qoe, low=1.0)
        if "KV" in name:
            bench.check(f"{where}: reorder, occupancy", at["reorder"].occupancy, low=fcfs.occupancy)


def run_for_real(bench: Bench, options: argparse.Namespace, costs: Costs, items: list[WorkItem]) -> None:
    """Runs each policy on the engine of the embedded model, at 1.1 of the capacity that virtual time predicts."""
    case = Case("engine", costs, items, MAX_NUM_SEQS)
    requests = at_rate(items, 1.1 * case.find_capacity())
    rows: list[tuple[object, ...]] = []
    answers = []
    for policy in POLICIES:
        engine = open_engine(
            options, scheduler=policy, prefix_cache=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS,
            max_batched_tokens=MAX_STEP_TOKENS, kv_memory_mb=case.num_blocks * costs.block_bytes / 2**20,
        )  # fmt: skip
        drive(engine, make_requests([WorkItem(0.0, make_tokens((6, i), 128, 2048), 128, 32) for i in range(8)], "warm-up"))
        result = drive(engine, requests)
        figures = Figures.of(result.recorder.records)
        answers.append(result.token_ids)
        rows.append((policy, figures.mean_s, figures.p99_s, figures.ttft_mean_s, figures.ttft_p99_s, figures.qoe))
    bench.print_rows(f"on the engine, {len(items)} requests at 1.1", ("policy", *HEADERS[1:6]), rows)
    bench.check_true("the same tokens under every policy", all(tokens == answers[0] for tokens in answers))


def plot(found: Found, cases: Sequence[Case], folder: Path) -> None:
    """Draws mean completion, TTFT P99, QoE and the longest wait over load, into `policies.png`."""
    figures = {"mean completion, s": "mean_s", "TTFT P99, s": "ttft_p99_s", "QoE": "qoe", "longest wait, s": "longest_wait_s"}
    path = folder / "policies.png"
    with draw(path, "Scheduling policies in virtual time", len(cases), len(figures), size=(3.4, 2.4)) as axes:
        for panel, (case, (label, field)) in zip(axes, product(cases, figures.items()), strict=True):
            panel.set_title(f"{case.name}: {label}", fontsize=8)
            for policy in POLICIES:
                values = [getattr(found[case.name, load, policy], field) for load in LOADS]
                panel.plot(LOADS, values, "o-", color=COLOURS[policy], label=policy, markersize=3)
            panel.set_xticks(LOADS)
            panel.set_ylim(bottom=0)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="upper right", ncols=len(POLICIES))


def main() -> int:
    parser = make_parser(__doc__, traces=(BURSTY,))
    parser.add_argument("--num-requests", type=int, default=800, help="requests of each load")
    parser.add_argument("--slowness", type=float, default=20.0, help="steps take so many times as long as the embedded model's")
    parser.add_argument("--costs", type=Path, help="results of an earlier run, whose measured costs are used")
    parser.add_argument("--real", type=int, default=60, help="requests on the engine itself; 0: none")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder for the plot")
    options = parser.parse_args()
    bench = Bench(
        "policies",
        "B5, B6, B7, B9: scheduling policies",
        "mlfq lowers mean completion on a heavy tail (FastServe), cfs the P99 of the time to the first token in bursts (Aqua), "
        "reorder fills KV memory (FlashGen: 88% to 98%), qoe raises mean QoE above capacity (Andes)",
    )
    measured = read_costs(options.costs) if options.costs else measure_costs(options)
    bench.figures["measured costs"] = asdict(measured)
    cases = list_cases(options, measured.slowed(options.slowness))
    found = run_virtually(bench, cases)
    judge(bench, found, cases)
    plot(found, cases, options.images)
    if options.real:
        run_for_real(bench, options, measured, draw_heavy_tailed(options.real, options.seed))
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
