"""B8, PrefillOnly: requests that end with their prompt, on a load of recommendations.

Every user has a long profile; a request asks for one token about one item, whose text follows the profile. Users take turns, and
the cache holds the profiles of a few of them. In virtual time (the server's scheduler and cache, steps as long as measured on the
embedded model) `prefill_only` stands beside `fcfs` and `lpm` at rates up to what none can hold: hits, mean and P99 completion,
the highest rate at which P99 keeps a bound, and what the weight of waiting does. `--real` repeats one rate on the engine itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

import msgspec

from benchmarks.harness import Bench, make_parser, open_engine
from benchmarks.replay import StepCosts, make_scheduler, replay
from cloister.bench.drive import Timed, drive, make_requests
from cloister.bench.recorder import RequestRecord
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.scheduler.policies import prefill_only

POLICIES = ("fcfs", "lpm", "prefill_only")
BLOCK_SIZE = 16
PROFILE_TOKENS = (700, 1100)
"""Shortest and longest profile: the paper's 11,000 to 17,000, over 16."""
ITEM_TOKENS = (24, 64)
MAX_MODEL_LEN = 2048
MAX_STEP_TOKENS = 512
CACHED_PROFILES = 4
"""Profiles of mean length for which there are blocks beside one longest request."""
LOADS = (0.5, 0.7, 0.9, 1.1, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Rates, over what can be computed if nothing is ever hit."""
WEIGHTS = (0.0, 0.01, 0.05, 0.2, 1.0)
P99_BOUND = 30.0
"""P99 of completion that a rate may have, in times of one request alone, without hits."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of users in turn.

    Attributes:
        gaps: of arrivals, with a mean of 1.
    """

    items: Sequence[WorkItem]
    gaps: Sequence[float]

    def at_rate(self, rate: float) -> list[Timed]:
        """Returns the requests at so many a second."""
        times = accumulate(gap / rate for gap in self.gaps)
        requests = make_requests(self.items)
        return [
            Timed(at_s, msgspec.structs.replace(timed.request, timeout_s=1e6))
            for at_s, timed in zip(times, requests, strict=True)
        ]


def draw_load(num_users: int, num_items: int, seed: int) -> Load:
    """Returns `num_items` requests for each of `num_users`, in random order; arrivals are a Poisson process."""
    draws = random.Random(seed)
    profiles = [make_tokens((8, seed, user), draws.randint(*PROFILE_TOKENS), 2048) for user in range(num_users)]
    users = [user for user in range(num_users) for _ in range(num_items)]
    draws.shuffle(users)
    items = []
    for i, user in enumerate(users):
        prompt = profiles[user] + make_tokens((9, seed, i), draws.randint(*ITEM_TOKENS), 2048)
        items.append(WorkItem(0.0, prompt, len(prompt), 1))
    return Load(items, [draws.expovariate(1.0) for _ in items])


def measure_costs(options: argparse.Namespace) -> StepCosts:
    """Runs prompts of many lengths on the engine."""
    engine = open_engine(options, max_model_len=MAX_MODEL_LEN, max_batched_tokens=MAX_STEP_TOKENS)
    draws = random.Random(options.seed)
    lengths = [draws.choice((8, 40, 64, 200, 500, 1000, 1800)) for _ in range(80)]
    items = [WorkItem(0.02 * i, make_tokens((7, i), n, 2048), n, 1) for i, n in enumerate(lengths)]
    return StepCosts.fit(drive(engine, make_requests(items)).recorder.steps)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run; times in seconds.

    Attributes:
        hits: share of prompt tokens that were cached.
    """

    hits: float
    mean_s: float
    p99_s: float
    worst_s: float
    rate: float

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Figures:
        times = sorted(record.e2e_s for record in records)
        num_tokens = sum(record.num_input_tokens for record in records)
        return cls(
            hits=sum(record.num_cached_tokens for record in records) / num_tokens,
            mean_s=statistics.fmean(times),
            p99_s=times[int(0.99 * len(times))],
            worst_s=times[-1],
            rate=len(records) / (max(record.end_s for record in records) - min(record.due_s for record in records)),
        )


HEADERS = ("hits", "mean s", "P99 s", "longest s", "requests/s")


def count_blocks() -> int:
    """Returns the blocks of the pool: for the longest request, and for a few profiles."""
    mean = sum(PROFILE_TOKENS) // 2
    return (PROFILE_TOKENS[1] + ITEM_TOKENS[1]) // BLOCK_SIZE + 2 + CACHED_PROFILES * mean // BLOCK_SIZE


def run(policy: str, requests: Sequence[Timed], costs: StepCosts) -> Figures:
    """Runs requests in virtual time."""
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=64, policy=policy, budget=BudgetConfig(MAX_STEP_TOKENS)
    )
    return Figures.of(replay(make_scheduler(config, count_blocks(), BLOCK_SIZE), requests, costs).recorder.records)


def request_s(load: Load, costs: StepCosts) -> float:
    """Returns how long a request takes alone on average, without hits."""
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, prefix_cache=False, budget=BudgetConfig(MAX_STEP_TOKENS))
    few = Load(load.items[:100], [1.0] * 100)
    records = replay(make_scheduler(config, count_blocks(), BLOCK_SIZE), few.at_rate(1e-3), costs).recorder.records
    return statistics.fmean(record.e2e_s for record in records)


def compare(bench: Bench, load: Load, costs: StepCosts) -> None:
    """Runs every policy at every rate, and finds the highest rate at which each keeps the bound of P99."""
    alone_s = request_s(load, costs)
    bench.figures["one request alone, s"] = alone_s
    found: dict[str, list[Figures]] = {}
    for policy in POLICIES:
        found[policy] = [run(policy, load.at_rate(factor / alone_s), costs) for factor in LOADS]
    rows = [
        (f"{policy} at {factor}", *asdict(figures).values())
        for i, factor in enumerate(LOADS)
        for policy, figures in ((policy, found[policy][i]) for policy in POLICIES)
    ]
    bench.print_rows(f"virtual time, {len(load.items)} requests, {count_blocks()} blocks", ("policy, load", *HEADERS), rows)
    kept = {
        policy: max((factor for factor, f in zip(LOADS, found[policy], strict=True) if f.p99_s <= P99_BOUND * alone_s), default=0.0)
        for policy in POLICIES
    }
    title = f"highest load whose P99 is at most {P99_BOUND:g} requests long"
    bench.print_rows(title, ("policy", "load", "requests/s"), [(p, factor, factor / alone_s) for p, factor in kept.items()])
    bench.check("highest load at that P99, prefill_only over fcfs", kept["prefill_only"] / max(kept["fcfs"], LOADS[0]), low=1.0)
    at = LOADS.index(1.5)
    bench.check("hits at 1.5, prefill_only over fcfs", found["prefill_only"][at].hits / found["fcfs"][at].hits, low=1.0)
    bench.check("mean at 1.5, prefill_only over fcfs", found["prefill_only"][at].mean_s / found["fcfs"][at].mean_s, high=1.0)


def weigh(bench: Bench, load: Load, costs: StepCosts) -> None:
    """Shows what the weight of waiting does at a rate at which requests queue."""
    rate, rows = 1.5 / request_s(load, costs), []
    chosen = prefill_only.FAIRNESS
    for weight in WEIGHTS:
        prefill_only.FAIRNESS = weight
        rows.append((str(weight), *asdict(run("prefill_only", load.at_rate(rate), costs)).values()))
    prefill_only.FAIRNESS = chosen
    bench.print_rows(f"prefill_only at 1.5, by weight of waiting ({chosen} is used)", ("weight", *HEADERS), rows)


def run_for_real(bench: Bench, options: argparse.Namespace, load: Load, costs: StepCosts) -> None:
    """Runs each policy on the engine, at a rate at which requests queue."""
    requests = load.at_rate(1.5 / request_s(load, costs))
    rows: list[tuple[object, ...]] = []
    answers = []
    for policy in POLICIES:
        engine = open_engine(
            options, scheduler=policy, prefix_cache=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=64,
            max_batched_tokens=MAX_STEP_TOKENS, kv_memory_mb=count_blocks() * options.block_kib / 1024, speculate="none",
        )  # fmt: skip
        drive(engine, make_requests([WorkItem(0.0, make_tokens((6, i), 300, 2048), 300, 1) for i in range(8)], "warm-up"))
        result = drive(engine, requests)
        answers.append(result.token_ids)
        rows.append((policy, *asdict(Figures.of(result.recorder.records)).values()))
    bench.print_rows(f"on the engine, {len(requests)} requests at 1.5", ("policy", *HEADERS), rows)
    bench.check_true("the same tokens under every policy", all(tokens == answers[0] for tokens in answers))
    bench.check("on the engine, hits, prefill_only over fcfs", float(str(rows[-1][1])) / float(str(rows[0][1])), low=1.0)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-users", type=int, default=40, help="users in virtual time")
    parser.add_argument("--num-items", type=int, default=30, help="requests of each user")
    parser.add_argument("--real", type=int, default=12, help="users on the engine itself; 0: none")
    parser.add_argument("--block-kib", type=float, default=0.0, help="KiB of a KV block; 0: asked of the engine")
    options = parser.parse_args()
    bench = Bench(
        "prefill_only",
        "B8 PrefillOnly: recommendations",
        "requests of one user run together while their profile is cached: more hits than in order of arrival, and up to four "
        "times the rate at equal P99 (the paper, on GPUs)",
    )
    costs = measure_costs(options)
    bench.figures["measured costs"] = asdict(costs)
    load = draw_load(options.num_users, options.num_items, options.seed)
    compare(bench, load, costs)
    weigh(bench, load, costs)
    if options.real:
        if not options.block_kib:
            engine = open_engine(options, max_model_len=MAX_MODEL_LEN)
            assert engine._kv_blocks is not None
            options.block_kib = engine._kv_blocks.form.sizes[0] / 1024
        run_for_real(bench, options, draw_load(options.real, options.num_items, options.seed), costs)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
