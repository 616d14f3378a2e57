"""B8, PrefillOnly: requests that end with their prompt, on a load of recommendations.

Every user has a long profile; a request asks for one token about one item, whose text follows the profile. Users take turns,
and the cache holds the profiles of a few of them. In virtual time (the server's scheduler and cache, steps as long as measured
on the embedded model) `prefill_only` stands beside `fcfs` and `lpm` at rates up to what none can hold: hits, mean and P99
completion, the highest rate at which P99 keeps a bound, and what the weight of waiting does. `--real` repeats one rate on the
engine itself. Then the longest prompts that fit into the same KV memory in all layers, and layer by layer: really run, with the
same bits as in ample memory, and what the tokens of a stream beside them wait.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise

import msgspec

from benchmarks.harness import Bench, make_parser, open_engine
from benchmarks.replay import StepCosts, make_scheduler, replay
from cloister.bench.drive import Timed, drive, make_requests
from cloister.bench.recorder import RequestRecord
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.engine import EngineCore
from cloister.scheduler import BudgetConfig, SchedulerConfig
from cloister.scheduler.policies import prefill_only
from cloister.types.clock import WallClock
from cloister.types.events import Submit
from cloister.types.request import Request, SamplingParams

POLICIES = ("fcfs", "lpm", "prefill_only")
BLOCK_SIZE = 16
PROFILE_TOKENS = (700, 1100)
"""Shortest and longest profile: the paper's 11,000 to 17,000, over 16."""
ITEM_TOKENS = (24, 64)
MAX_MODEL_LEN = 2048
MAX_STEP_TOKENS = 512
CACHED_PROFILES = 4
"""Profiles of mean length for which there are blocks beside one longest request."""
LOADS = (0.5, 0.7, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0)
"""Rates, over what can be computed if nothing is ever hit."""
WEIGHTS = (0.0, 0.002, 0.01, 0.05, 0.2, 1.0)
P99_BOUNDS = (30.0, 60.0, 120.0)
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
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=64, policy=policy, budget=BudgetConfig(MAX_STEP_TOKENS))
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
        (policy, bound): max(
            (f for f, run in zip(LOADS, found[policy], strict=True) if run.p99_s <= bound * alone_s), default=0.0
        )
        for policy in POLICIES
        for bound in P99_BOUNDS
    }
    headers = ("policy", *(f"P99 of {bound:g} requests" for bound in P99_BOUNDS))
    bench.print_rows(
        "highest load at that P99", headers, [(policy, *(kept[policy, bound] for bound in P99_BOUNDS)) for policy in POLICIES]
    )
    for bound in P99_BOUNDS:
        ratio = kept["prefill_only", bound] / max(kept["fcfs", bound], LOADS[0])
        bench.check(f"highest load at a P99 of {bound:g} requests, prefill_only over fcfs", ratio, low=1.0)
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


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory for a model in which prompts shall fit.

    Attributes:
        kv_dtype: of KV; None: the model's default.
        num_plain: tokens whose KV of all layers fits.
    """

    model: str
    kv_dtype: str | None
    num_plain: int

    def open(self, options: argparse.Namespace, *, longest: int = 0, ample: int = 0) -> EngineCore:
        """Returns an engine.

        Args:
            longest: prompts that are computed layer by layer; 0: none.
            ample: memory for so many tokens in place of `num_plain`.
        """
        length = ample or self.num_plain
        settings = {"model": self.model, "kv_dtype": self.kv_dtype, "max_model_len": length, "max_num_seqs": 2}
        probe = open_engine(options, **settings)
        assert probe._kv_blocks is not None
        kv_memory_mb = probe._kv_blocks.form.sizes[0] * -(-length // BLOCK_SIZE) / 2**20
        return open_engine(
            options, **settings, kv_memory_mb=kv_memory_mb, max_prefill_only_len=longest or None, speculate="none"
        )


MEMORIES = (
    Memory("smollm2-135m", "bfloat16", 256),
    Memory("smollm2-135m", "int8", 256),
    Memory("cloister-5m", "bfloat16", 2048),
)


STREAM_PROMPT = 1500
"""Tokens of the prompt beside a stream."""


def score(engine: EngineCore, tokens: list[int]) -> tuple[float, str, object]:
    """Returns (seconds, how it ended, one token with its log-probabilities)."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
    found: list[object] = []
    engine.input_queue.put(Submit(Request(request_id="long", token_ids=tokens, sampling=sampling, timeout_s=1e6)))
    clock = WallClock()
    start_s = clock.now()
    while True:
        outputs = engine.step()
        for output in [] if outputs is None else outputs.outputs:
            found += [output.token_ids, output.logprobs]
            if output.finish_reason is not None:
                return clock.now() - start_s, str(output.finish_reason), found


def compare_lengths(bench: Bench, options: argparse.Namespace) -> None:
    """Runs the longest prompt of each memory both ways."""
    rows = []
    for memory in MEMORIES:
        longest = min(8000, memory.open(options, longest=memory.num_plain + 1)._scheduler.max_layerwise_positions)
        vocab = 4096 if memory.model == "cloister-5m" else 40000
        tokens = make_tokens((3, 1), longest, vocab)
        plain, layerwise = memory.open(options), memory.open(options, longest=longest)
        ample = memory.open(options, ample=longest + 16)
        _, ended, _ = score(plain, tokens[: memory.num_plain - 1])
        _, refused, _ = score(plain, tokens[: memory.num_plain + 1])
        layerwise_s, layerwise_ended, answer = score(layerwise, tokens)
        ample_s, _, expected = score(ample, tokens)
        name = f"{memory.model}, {memory.kv_dtype or 'default'} KV"
        rows.append((name, memory.num_plain, longest, longest / memory.num_plain, ample_s, layerwise_s, layerwise_s / ample_s))
        bench.check_true(
            f"{name}: both ran, one token more is refused",
            (ended, refused, layerwise_ended) == ("length", "rejected", "length"),
        )
        bench.check_true(f"{name}: the bits of ample memory", answer == expected)
        if memory.model != "cloister-5m":
            bench.check(f"{name}: longest prompt over plain", longest / memory.num_plain, low=4.0)
    headers = (
        "model",
        "tokens in all layers",
        "layer by layer",
        "ratio",
        "s in ample memory",
        "s layer by layer",
        "ratio of times",
    )
    bench.print_rows("longest prompt in the same KV memory", headers, rows)


def watch_streams(bench: Bench, options: argparse.Namespace) -> None:
    """Measures gaps of a stream while a long prompt is computed, both ways."""
    rows = []
    memory = Memory("smollm2-135m", "bfloat16", 1024)  # for the stream too: else it preempts the prompt
    tokens = make_tokens((3, 2), STREAM_PROMPT, 40000)
    stream = WorkItem(0.0, make_tokens((3, 3), 64, 40000), 64, options.stream_tokens)
    long = WorkItem(3.0, tokens, len(tokens), 1)
    for name, engine in (
        ("alone", memory.open(options)),
        (f"beside {STREAM_PROMPT} tokens in ample memory", memory.open(options, ample=STREAM_PROMPT + 600)),
        (f"beside {STREAM_PROMPT} tokens layer by layer", memory.open(options, longest=STREAM_PROMPT)),
    ):
        drive(engine, make_requests([WorkItem(0.0, tokens[:200], 200, 8)], "warm-up"))
        items = [stream] if name == "alone" else [stream, long]
        records = drive(engine, make_requests(items)).recorder.records
        first = records[0]
        end_s = records[-1].end_s if len(records) > 1 else first.end_s
        times = [at_s for at_s, _ in first.deliveries]
        gaps = sorted(b - a for a, b in pairwise(times) if 3.0 <= b <= max(end_s, 4.0))
        prompt_s = records[-1].e2e_s if len(records) > 1 else 0.0
        rows.append((name, statistics.median(gaps), gaps[int(0.99 * len(gaps))], gaps[-1], prompt_s))
    bench.print_rows("gaps of a stream, smollm2-135m", ("stream", "median s", "P99 s", "longest s", "prompt s"), rows)
    bench.check("P99 gap, layer by layer over ample memory", float(str(rows[2][2])) / float(str(rows[1][2])), high=1.5)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-users", type=int, default=40, help="users in virtual time")
    parser.add_argument("--num-items", type=int, default=30, help="requests of each user")
    parser.add_argument("--real", type=int, default=12, help="users on the engine itself; 0: none")
    parser.add_argument("--stream-tokens", type=int, default=300, help="tokens of the stream beside a long prompt")
    parser.add_argument("--part", choices=("load", "memory", "stream", "all"), default="all", help="what is measured")
    parser.add_argument("--block-kib", type=float, default=0.0, help="KiB of a KV block; 0: asked of the engine")
    options = parser.parse_args()
    bench = Bench(
        "prefill_only",
        "B8 PrefillOnly: recommendations",
        "requests of one user run together while their profile is cached: more hits than in order of arrival, and up to four "
        "times the rate at equal P99 (the paper, on GPUs)",
    )
    if options.part in ("memory", "all"):
        compare_lengths(bench, options)
    if options.part in ("stream", "all"):
        watch_streams(bench, options)
    if options.part in ("load", "all"):
        run_load(bench, options)
    return bench.finish(options)


def run_load(bench: Bench, options: argparse.Namespace) -> None:
    """Runs the load of recommendations in virtual time, and on the engine."""
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


if __name__ == "__main__":
    sys.exit(main())
