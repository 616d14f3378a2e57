"""Traces of real services on two replicas: every router, mixed and disaggregated, predicted in virtual time and measured.

    python -m benchmarks.cluster_traces [--models cloister-5m,smollm2:int8] [--seconds 3.5]

The times of steps, messages and transfers of KV are measured first. The virtual cluster then runs the code of production with
them, and real processes run the same requests: prompts of the Mooncake trace share the beginnings that they share there. One
workload is made up: one system prompt in front of every prompt. Lengths and rates are scaled to this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from matplotlib.patches import Patch

from benchmarks.cluster_costs import LAYOUTS, MAX_LEN, MIXED, VOCAB, Costs, calibrate, local_cluster
from benchmarks.harness import AZURE, MOONCAKE, ROOT, Bench, console, make_parser, make_progress
from cloister.bench.drive import drive_client, make_requests
from cloister.bench.plots import BLUE, ORANGE, draw
from cloister.bench.report import LatencyObjective, Summary, summarise
from cloister.bench.traces import Trace, TraceRow, read_trace
from cloister.bench.workloads import Recipe, WorkItem, build_workload, make_tokens
from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.virtual.engine import write_byte_tokenizer
from cloister.cluster.virtual.event_loop import run_virtually
from cloister.cluster.virtual.prediction import running_cluster
from cloister.text import Tokenizer

SYSTEM_TOKENS: Final = 256
SYSTEM_PROMPT: Final = "one system prompt"
MIN_REQUESTS: Final = 10
FIGURES: Final[dict[str, Callable[[Summary], float]]] = {
    "TTFT P50, ms": lambda run: _spread(run, "ttft", "p50"), "TTFT P99, ms": lambda run: _spread(run, "ttft", "p99"),
    "TBT P50, ms": lambda run: _spread(run, "tbt", "p50"), "TBT P99, ms": lambda run: _spread(run, "tbt", "p99"),
}  # fmt: skip
SHARES: Final[dict[str, Callable[[Summary], float]]] = {
    "goodput, share": lambda run: run.slo_share or 0.0,
    "cached, share": lambda run: run.num_cached_tokens / max(1, run.num_input_tokens),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How a model fits this machine: factors on the lengths of both traces, and limits that a good answer keeps."""

    mooncake: Fraction
    azure: Fraction
    objective: LatencyObjective


SCALES: Final = {
    "cloister-5m": Scale(Fraction(1, 16), Fraction(1, 4), LatencyObjective(0.1, 0.05)),
    "smollm2:int8": Scale(Fraction(1, 32), Fraction(1, 8), LatencyObjective(0.5, 0.1)),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one cluster.

    Attributes:
        busiest: share of the requests that the replica with most of them got.
    """

    summary: Summary
    busiest: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction and what it is compared with."""

    model: str
    workload: str
    router: str
    layout: str
    predicted: Run
    measured: Run


async def measure(cluster: ReplicaSet, items: Sequence[WorkItem], goal: LatencyObjective, on_end: Callable[[], None]) -> Run:
    """Runs a workload, after two requests of other text; the same for every cluster."""
    longest = sorted(items, key=lambda item: -item.num_input_tokens)[:2]
    warm_up = [
        WorkItem(0.0, make_tokens((9, number), item.num_input_tokens, VOCAB), item.num_input_tokens, 4)
        for number, item in enumerate(longest)
    ]
    await drive_client(cluster, make_requests(warm_up, "warm-up"))
    before = [replica.num_routed for replica in cluster.snapshots()]
    records = await drive_client(cluster, make_requests(items), on_end=on_end)
    routed = [replica.num_routed - old for replica, old in zip(cluster.snapshots(), before, strict=True)]
    return Run(summarise("", records, goal), max(routed) / sum(routed))


# Workloads


def sample_conversations(rows: Sequence[TraceRow], num: int, seed: int) -> list[TraceRow]:
    """Returns about `num` rows: whole conversations, which are those whose second block is the same (the first one is the same
    in all rows of the trace). So prompts share as much as in the whole trace, though there are few."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row.hash_ids[:2][-1]] = counts.get(row.hash_ids[:2][-1], 0) + 1
    chosen: set[int] = set()
    names = sorted(counts)
    random.Random(seed).shuffle(names)
    for name in names:
        if sum(counts[each] for each in chosen) >= num:
            break
        chosen.add(name)
    return [row for row in rows if row.hash_ids[:2][-1] in chosen]


def make_workloads(options: argparse.Namespace, model: str, costs: Costs) -> dict[str, tuple[WorkItem, ...]]:
    """Returns workloads of `options.seconds` each, which take a share of `options.load` of both replicas' time."""
    scale = SCALES[model]

    def build(trace: Trace, factor: Fraction, rate: float | None = None) -> tuple[WorkItem, ...]:
        recipe = Recipe(rate=rate, scale=factor, max_model_len=MAX_LEN, vocab_size=VOCAB, seed=options.seed)
        return build_workload(trace, recipe).items

    def choose(trace: Trace, factor: Fraction, pick: Callable[[int], Sequence[TraceRow]]) -> tuple[WorkItem, ...]:
        work_s = statistics.mean(costs.work_s(item) for item in build(replace(trace, rows=trace.rows[:400]), factor))
        rate = options.load * 2 / work_s
        return build(replace(trace, rows=tuple(pick(max(MIN_REQUESTS, round(rate * options.seconds))))), factor, rate)

    mooncake, azure = (read_trace(options.traces / name) for name in (MOONCAKE, AZURE))
    short = [row for row in mooncake.rows if row.num_input_tokens + row.num_output_tokens <= MAX_LEN / scale.mooncake]
    system = make_tokens((options.seed, 7), SYSTEM_TOKENS, VOCAB)
    plain = choose(azure, scale.azure, lambda num: azure.rows[:num])
    return {
        "Mooncake": choose(mooncake, scale.mooncake, lambda num: sample_conversations(short, num, options.seed)),
        "Azure": plain,
        SYSTEM_PROMPT: tuple(
            replace(item, prompt=[*system, *item.prompt], num_input_tokens=len(system) + len(item.prompt)) for item in plain
        ),
    }  # fmt: skip


# Runs


def run_all(options: argparse.Namespace, bench: Bench) -> list[Pair]:
    """Measures costs, then predicts and measures every run."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(write_byte_tokenizer(Path(folder)))
    for model in options.models.split(","):
        with console.status(f"{model}: measuring steps, messages and transfers"):
            costs = asyncio.run(calibrate(options, model))
        workloads = make_workloads(options, model, costs)
        show_costs(bench, model, costs, workloads)
        cases = [
            (name, router, layout)
            for name, router, layout in product(workloads, options.routers.split(","), LAYOUTS)
            if name != SYSTEM_PROMPT or layout == MIXED  # it asks which of mixed replicas gets the requests
        ]
        with make_progress() as progress:
            bar = progress.add_task(model, total=2 * sum(len(workloads[name]) for name, *_ in cases))
            for name, router, layout in cases:
                progress.update(bar, description=f"{model}, {name}, {router}, {layout}")
                args = (workloads[name], SCALES[model].objective, partial(progress.advance, bar))
                predicted = run_virtually(
                    measure_on(running_cluster(costs.shape(router, layout, options.cores), tokenizer, options.seed), *args)
                )
                measured = asyncio.run(measure_on(local_cluster(options, model, router, layout), *args))
                pairs.append(Pair(model, name, router, layout, predicted, measured))
    return pairs


async def measure_on(cluster: AbstractAsyncContextManager[ReplicaSet], *args: Any) -> Run:
    """Runs a workload on a cluster of its own, whose cache is empty."""
    async with cluster as running:
        return await measure(running, *args)


# What is shown


def show_costs(bench: Bench, model: str, costs: Costs, workloads: dict[str, tuple[WorkItem, ...]]) -> None:
    steps = costs.steps
    bench.print_rows(
        f"{model}: measured first",
        ("step, ms", "token, µs", "sample, µs", "key, ns", "key read, ns", "message, ms", "KV of a block, ms", "blocks",
         "front, µs a request", "a message", "a token"),
        [
            (
                steps.step_s * 1e3, steps.token_s * 1e6, steps.sample_s * 1e6, steps.key_s * 1e9, steps.read_s * 1e9,
                costs.delay_s * 1e3, costs.entry_s * 1e3, costs.num_blocks,
                costs.front.request_s * 1e6, costs.front.message_s * 1e6, costs.front.token_s * 1e6,
            )
        ],
    )  # fmt: skip
    bench.print_rows(
        f"{model}: workloads",
        ("workload", "requests", "seconds", "tokens in, mean", "tokens out, mean"),
        [
            (
                name, len(items), items[-1].arrival_s, statistics.mean(item.num_input_tokens for item in items),
                statistics.mean(item.num_output_tokens for item in items),
            )
            for name, items in workloads.items()
        ],
    )  # fmt: skip


def show(bench: Bench, pairs: Sequence[Pair]) -> None:
    """Prints each run, measured and in brackets predicted; then how far both are apart."""
    for model, workload in dict.fromkeys((pair.model, pair.workload) for pair in pairs):
        rows = []
        for pair in (pair for pair in pairs if (pair.model, pair.workload) == (model, workload)):
            both = pair.measured.summary, pair.predicted.summary
            cells = [f"{figure(both[0]):.1f} ({figure(both[1]):.1f})" for figure in FIGURES.values()]
            cells += [f"{figure(both[0]):.2f} ({figure(both[1]):.2f})" for figure in SHARES.values()]
            busiest = f"{pair.measured.busiest:.2f} ({pair.predicted.busiest:.2f})" if pair.layout == MIXED else "-"
            rows.append((pair.router, pair.layout, *cells, busiest))
        title = f"{model}, {workload} ({SCALES[model].objective.words}); measured (predicted)"
        bench.print_rows(title, ("router", "layout", *FIGURES, *SHARES, "busiest, share"), rows)
    errors = {name: [error(pair, figure) for pair in pairs] for name, figure in FIGURES.items()}
    bench.print_rows(
        "Error of the prediction",
        ("figure", "median", "P90", "largest"),
        [
            *((name, *(f"{x:+.0%}" for x in spread_of(errors[name]))) for name in errors),
            *((name, *(f"{x:.2f}" for x in spread_of(gaps(pairs, figure)))) for name, figure in SHARES.items()),
        ],
    )
    judge(bench, pairs, errors)


def judge(bench: Bench, pairs: Sequence[Pair], errors: dict[str, list[float]]) -> None:
    num_failed = sum(run.summary.num_requests - run.summary.num_ok for pair in pairs for run in (pair.measured, pair.predicted))
    bench.check("requests without an answer", num_failed, high=0)
    for name, values in errors.items():
        bench.check(f"median error of {name}", statistics.median(map(abs, values)), high=0.25)
    bench.check("median error of goodput", statistics.median(gaps(pairs, SHARES["goodput, share"])), high=0.1)
    for model in dict.fromkeys(pair.model for pair in pairs):
        shared = {p.router: p.measured.summary for p in pairs if (p.model, p.workload) == (model, SYSTEM_PROMPT)}
        if {"prefix_aware", "round_robin"} <= shared.keys():
            both = [FIGURES["TTFT P99, ms"](shared[router]) for router in ("prefix_aware", "round_robin")]
            bench.check(f"{model}, {SYSTEM_PROMPT}: TTFT P99 of prefix_aware over round_robin", both[0] / both[1], high=1.25)


def error(pair: Pair, figure: Callable[[Summary], float]) -> float:
    """Returns by how much a prediction is too large, as a share of what was measured."""
    return figure(pair.predicted.summary) / max(1e-9, figure(pair.measured.summary)) - 1.0


def gaps(pairs: Sequence[Pair], figure: Callable[[Summary], float]) -> list[float]:
    """Returns the differences of shares."""
    return [abs(figure(pair.predicted.summary) - figure(pair.measured.summary)) for pair in pairs]


def spread_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median, the P90 and the largest by size."""
    ordered = sorted(values, key=abs)
    return statistics.median(values), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1]


def plot(path: Path, model: str, pairs: Sequence[Pair]) -> None:
    """Draws the runs of a model: a row of panels for each workload, a bar for each measured figure, a line where predicted."""
    workloads = list(dict.fromkeys(pair.workload for pair in pairs))
    figures = {name: FIGURES[name] for name in ("TTFT P50, ms", "TTFT P99, ms", "TBT P99, ms")}
    figures["goodput, share"] = SHARES["goodput, share"]
    routers = list(dict.fromkeys(pair.router for pair in pairs))
    title = f"{model} on two replicas: measured (bars), predicted in virtual time (lines)"
    with draw(path, title, len(workloads), len(figures), size=(3.4, 2.6)) as axes:
        for panel, (workload, (name, figure)) in zip(axes, product(workloads, figures.items()), strict=True):
            panel.set_title(f"{workload}: {name}", fontsize=9)
            for pair in (pair for pair in pairs if pair.workload == workload):
                is_mixed = pair.layout == MIXED
                place = routers.index(pair.router) + (-0.2 if is_mixed else 0.2)
                panel.barh(place, figure(pair.measured.summary), 0.36, color=BLUE if is_mixed else ORANGE)
                predicted = figure(pair.predicted.summary)
                panel.plot([predicted, predicted], [place - 0.19, place + 0.19], color="black", linewidth=2)
            panel.set_yticks(range(len(routers)), routers if name == next(iter(figures)) else [""] * len(routers))
            panel.invert_yaxis()
        bars = [Patch(color=colour, label=layout) for colour, layout in zip((BLUE, ORANGE), LAYOUTS, strict=True)]
        axes[0].figure.legend(handles=bars, loc="upper right", ncols=2)


def _spread(run: Summary, latency: str, percentile: str) -> float:
    spread = getattr(run, latency)
    return 0.0 if spread is None else float(getattr(spread, percentile)) * 1e3


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default=",".join(SCALES), help="with commas")
    parser.add_argument("--routers", default=",".join(ROUTERS.names()), help="with commas")
    parser.add_argument("--seconds", type=float, default=3.5, help="of each run, until the last request is sent")
    parser.add_argument("--load", type=float, default=0.7, help="share of both replicas' time that requests take")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that engines, front and client share, as predicted")
    parser.add_argument("--kv-memory-mb", type=float, default=512.0, help="of each replica")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder for the plots")
    options = parser.parse_args()
    if unknown := set(options.models.split(",")) - SCALES.keys():
        parser.error(f"--models: no scale for {', '.join(sorted(unknown))}; there is one for {', '.join(SCALES)}")
    bench = Bench(
        "cluster_traces",
        "Traces on two replicas: routers and layouts, predicted in virtual time and measured on processes",
        "the virtual cluster is within a quarter of the processes for the median run; prefix_aware and conductor find most in "
        "the cache; with one prefill replica its queue lengthens TTFT, and answers stall less; one system prompt delays nobody",
    )
    load = os.getloadavg()
    pairs = run_all(options, bench)
    bench.figures["load average before, after"] = [load[0], os.getloadavg()[0]]
    bench.figures["runs"] = [asdict(pair) for pair in pairs]
    show(bench, pairs)
    for model in dict.fromkeys(pair.model for pair in pairs):
        plot(
            options.images / f"cluster-traces-{model.replace(':', '-')}.png",
            model,
            [pair for pair in pairs if pair.model == model],
        )
    console.print(f"load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
