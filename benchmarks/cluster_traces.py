"""Traces of real services on two replicas: every router, mixed and disaggregated, predicted in virtual time and measured.

    python -m benchmarks.cluster_traces [--models cloister-5m,smollm2:int8] [--seconds 3.5]
    python -m benchmarks.cluster_traces --keep measured.jsonl --sitting-s 45    # again and again, until all runs are measured
    python -m benchmarks.cluster_traces --keep measured.jsonl                   # predicts them, and compares
    python -m benchmarks.cluster_traces --keep measured.jsonl --recalibrate     # the same, with costs that are measured again

The times of steps, messages and transfers of KV are measured first, with loads that are no traces (`cluster_costs`). Real
processes then run the traces, and the virtual cluster runs the code of production with the measured times: prompts of the
Mooncake trace share the beginnings that they share there. One workload is made up: one system prompt in front of every prompt.
Lengths and rates are scaled to this machine. How much of the cores other programs took is measured too, and a run with more
than a tenth is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from matplotlib.patches import Patch

from benchmarks.cluster_costs import LAYOUTS, MAX_LEN, MIXED, VOCAB, Costs, OtherPrograms, StepTimes, calibrate, local_cluster
from benchmarks.harness import AZURE, MOONCAKE, ROOT, Bench, console, make_parser, make_progress
from cloister.bench.drive import drive_client, make_requests
from cloister.bench.plots import BLUE, ORANGE, draw
from cloister.bench.report import LatencyObjective, Summary, summarise
from cloister.bench.traces import Trace, TraceRow, read_trace
from cloister.bench.workloads import Recipe, WorkItem, build_workload, make_tokens
from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.cluster.virtual.event_loop import run_virtually
from cloister.cluster.virtual.prediction import running_cluster
from cloister.text import Tokenizer

SYSTEM_TOKENS: Final = 256
SYSTEM_PROMPT: Final = "one system prompt"
QUIET: Final = 0.1
"""Share of the cores that other programs may take: a run with more is measured again."""
SIT_AGAIN: Final = 3
"""Exit status of a sitting that leaves runs to measure."""
WORKLOADS: Final = ("Mooncake", "Azure", SYSTEM_PROMPT)
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
        others: share of the cores that other programs took.
    """

    summary: Summary
    busiest: float
    others: float = 0.0


class Case(NamedTuple):
    """A workload on a cluster."""

    model: str
    workload: str
    router: str
    layout: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction and what it is compared with."""

    case: Case
    predicted: Run
    measured: Sequence[Run]

    def figures(self, figure: Callable[[Summary], float]) -> tuple[float, float]:
        """Returns what was measured, as the median of its runs, and what was predicted."""
        return statistics.median(figure(run.summary) for run in self.measured), figure(self.predicted.summary)


class Kept(msgspec.Struct, omit_defaults=True):
    """A line of the file of what was measured (`--keep`): costs of a model, or a run."""

    options: str
    model: str
    costs: Costs | None = None
    case: Case | None = None
    run: Run | None = None


class KeptFileError(Exception):
    """The file of what was measured cannot be used."""


@dataclass
class Record:
    """What was measured, in this sitting and before.

    Args:
        path: where it is kept; None: nowhere.
        options: a digest of what it depends on; what was measured with others is left out.

    Attributes:
        costs: of each model, as measured last: predictions are made of them.
        steps: of each model, as measured first: rates of its workloads follow from them, so runs of all sittings are the same.
        runs: of each case.

    Raises:
        KeptFileError: the file there is not one of this version of the benchmark.
    """

    path: Path | None
    options: str
    costs: dict[str, Costs] = field(default_factory=dict)
    steps: dict[str, StepTimes] = field(default_factory=dict)
    runs: dict[Case, list[Run]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
                kept = _read_kept(self.path, number, line)
                if kept.options == self.options:
                    self._take(kept)

    def add(self, model: str, costs: Costs | None = None, case: Case | None = None, run: Run | None = None) -> None:
        """Adds costs, or a run of a case."""
        kept = Kept(self.options, model, costs, case, run)
        self._take(kept)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(kept) + b"\n")

    def num_quiet(self, case: Case) -> int:
        """Returns how many runs of a case were measured while other programs took little of the cores."""
        return sum(run.others <= QUIET for run in self.runs.get(case, ()))

    def choose(self, case: Case) -> list[Run]:
        """Returns the runs of a case that were quiet; if none was, the one with the least of other programs."""
        runs = self.runs[case]
        return [run for run in runs if run.others <= QUIET] or [min(runs, key=lambda run: run.others)]

    def _take(self, kept: Kept) -> None:
        if kept.costs is not None:
            self.costs[kept.model] = kept.costs
            self.steps.setdefault(kept.model, kept.costs.steps)
        if kept.case is not None and kept.run is not None:
            self.runs.setdefault(kept.case, []).append(kept.run)


def _read_kept(path: Path, number: int, line: bytes) -> Kept:
    try:
        return msgspec.json.decode(line, type=Kept)
    except msgspec.MsgspecError as error:
        raise KeptFileError(
            f"line {number} of {path} was not written by this version of the benchmark ({error}), and predictions need what it "
            "lacks: name another file, into which all is measured anew, or delete this one"
        ) from error


async def measure(cluster: ReplicaSet, items: Sequence[WorkItem], goal: LatencyObjective, late_s: float = 0.0) -> Run:
    """Runs a workload, after two requests of other text; the same for every cluster.

    Args:
        late_s: as of `drive_client`.
    """
    longest = sorted(items, key=lambda item: -item.num_input_tokens)[:2]
    warm_up = [
        WorkItem(0.0, make_tokens((9, number), item.num_input_tokens, VOCAB), item.num_input_tokens, 4)
        for number, item in enumerate(longest)
    ]
    await drive_client(cluster, make_requests(warm_up, "warm-up"))
    before = [replica.num_routed for replica in cluster.snapshots()]
    others = OtherPrograms(cluster)
    records = await drive_client(cluster, make_requests(items), late_s=late_s)
    share = others.share()
    routed = [replica.num_routed - old for replica, old in zip(cluster.snapshots(), before, strict=True)]
    return Run(summarise("", records, goal), max(routed) / sum(routed), share)


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


def make_workloads(options: argparse.Namespace, model: str, steps: StepTimes) -> dict[str, tuple[WorkItem, ...]]:
    """Returns workloads of `options.seconds` each, which take a share of `options.load` of both replicas' time."""
    scale = SCALES[model]

    def build(trace: Trace, factor: Fraction, rate: float | None = None) -> tuple[WorkItem, ...]:
        recipe = Recipe(rate=rate, scale=factor, max_model_len=MAX_LEN, vocab_size=VOCAB, seed=options.seed)
        return build_workload(trace, recipe).items

    def choose(trace: Trace, factor: Fraction, pick: Callable[[int], Sequence[TraceRow]]) -> tuple[WorkItem, ...]:
        work_s = statistics.mean(steps.work_s(item) for item in build(replace(trace, rows=trace.rows[:400]), factor))
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


def list_cases(options: argparse.Namespace, model: str) -> list[Case]:
    """Returns the runs of a model."""
    return [
        Case(model, workload, router, layout)
        for workload, router, layout in product(WORKLOADS, options.routers.split(","), LAYOUTS)
        if workload != SYSTEM_PROMPT or layout == MIXED  # it asks which of mixed replicas gets the requests
    ]


def measure_all(options: argparse.Namespace, record: Record) -> bool:
    """Measures costs, and runs that have not been measured while other programs were quiet; returns whether none is left."""
    end_s = float("inf") if options.sitting_s is None else time.monotonic() + options.sitting_s
    for model in options.models.split(","):
        if options.recalibrate or model not in record.costs:
            with console.status(f"{model}: measuring steps, messages and transfers"):
                record.add(model, costs=asyncio.run(calibrate(options, model)))
        workloads = make_workloads(options, model, record.steps[model])
        cases = list_cases(options, model) * options.repeats
        with make_progress() as progress:
            bar = progress.add_task(model, total=len(cases))
            for case in cases:
                progress.update(bar, description=", ".join(case), advance=1)
                if record.num_quiet(case) >= options.repeats:
                    continue
                if time.monotonic() > end_s:
                    return False
                cluster = local_cluster(options, model, case.router, case.layout)
                run = asyncio.run(measure_on(cluster, workloads[case.workload], SCALES[model].objective))
                record.add(model, case=case, run=run)
    models = options.models.split(",")
    return all(record.num_quiet(case) >= options.repeats for model in models for case in list_cases(options, model))


def predict_all(options: argparse.Namespace, record: Record, bench: Bench) -> list[Pair]:
    """Predicts every run from the measured costs."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(write_byte_tokenizer(Path(folder)))
    for model in options.models.split(","):
        costs = record.costs[model]
        workloads = make_workloads(options, model, record.steps[model])
        show_costs(bench, model, costs, workloads)
        with make_progress() as progress:
            for case in progress.track(list_cases(options, model), description=f"{model}, predicted"):
                shape = costs.shape(case.router, case.layout, options.cores)
                args = (workloads[case.workload], SCALES[model].objective, costs.late_s)
                predicted = run_virtually(measure_on(running_cluster(shape, tokenizer, options.seed), *args))
                pairs.append(Pair(case, predicted, record.choose(case)))
    return pairs


async def measure_on(cluster: AbstractAsyncContextManager[ReplicaSet], *args: Any) -> Run:
    """Runs a workload on a cluster of its own, whose cache is empty."""
    async with cluster as running:
        return await measure(running, *args)


# What is shown


def show_costs(bench: Bench, model: str, costs: Costs, workloads: dict[str, tuple[WorkItem, ...]]) -> None:
    steps = costs.steps
    bench.print_rows(
        f"{model}: measured first, a step of so many tokens, ms",
        ("tokens", *(str(num_tokens) for num_tokens, _ in steps.curve)),
        [("ms", *(each_s * 1e3 for _, each_s in steps.curve))],
    )
    bench.print_rows(
        f"{model}: measured first",
        ("sample, µs", "request, µs", "key, ns", "key read, ns", "steps in company", "message, ms", "timer late, ms",
         "load, µs a block", "blocks", "front, µs a request", "a message", "a token"),
        [
            (
                steps.sample_s * 1e6, steps.arrival_s * 1e6, steps.key_s * 1e9, steps.read_s * 1e9, costs.company,
                costs.delay_s * 1e3, costs.late_s * 1e3, costs.load_s * 1e6, costs.num_blocks,
                costs.front.request_s * 1e6, costs.front.message_s * 1e6, costs.front.token_s * 1e6,
            )
        ],
    )  # fmt: skip
    bench.print_rows(
        f"{model}: measured first, links between engines, µs",
        ("a pull that is served", "a block that goes", "a pull", "a block that comes"),
        [[each_s * 1e6 for each_s in astuple(costs.links)]],
    )
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
    for model, workload in dict.fromkeys(pair.case[:2] for pair in pairs):
        rows = []
        for pair in (pair for pair in pairs if pair.case[:2] == (model, workload)):
            cells = ["{:.2f} ({:.2f})".format(*pair.figures(figure)) for figure in (FIGURES | SHARES).values()]
            busiest = statistics.median(run.busiest for run in pair.measured)
            cells.append(f"{busiest:.2f} ({pair.predicted.busiest:.2f})" if pair.case.layout == MIXED else "-")
            others = statistics.median(run.others for run in pair.measured)
            rows.append((pair.case.router, pair.case.layout, *cells, f"{others:.0%}"))
        title = f"{model}, {workload} ({SCALES[model].objective.words}); measured (predicted)"
        bench.print_rows(title, ("router", "layout", *FIGURES, *SHARES, "busiest, share", "other programs"), rows)
    for model, layout in dict.fromkeys((pair.case.model, pair.case.layout) for pair in pairs):
        chosen = [pair for pair in pairs if (pair.case.model, pair.case.layout) == (model, layout)]
        show_errors(bench, f"Error of the prediction: {model}, {layout}", chosen)
    show_errors(bench, "Error of the prediction", pairs)
    errors = {name: [error(pair, figure) for pair in pairs] for name, figure in FIGURES.items()}
    judge(bench, pairs, errors)


def show_errors(bench: Bench, title: str, pairs: Sequence[Pair]) -> None:
    """Prints how far predictions are from what was measured, and how far the runs of one case are apart."""
    rows = []
    for name, figure in FIGURES.items():
        errors = [error(pair, figure) for pair in pairs]
        sizes = statistics.median(map(abs, errors))
        noise = statistics.median(spread_of_runs(pair, figure) for pair in pairs)
        rows.append((name, f"{statistics.median(errors):+.0%}", f"{sizes:.0%}", *far_ends(errors, "{:+.0%}"), f"{noise:.0%}"))
    for name, figure in SHARES.items():
        apart = gaps(pairs, figure)
        rows.append((name, "", f"{statistics.median(apart):.2f}", *far_ends(apart, "{:.2f}"), ""))
    bench.print_rows(f"{title} ({len(pairs)} runs)", ("figure", "median", "median size", "P90", "largest", "runs apart"), rows)


def judge(bench: Bench, pairs: Sequence[Pair], errors: dict[str, list[float]]) -> None:
    runs = [run for pair in pairs for run in (*pair.measured, pair.predicted)]
    bench.check("requests without an answer", sum(run.summary.num_requests - run.summary.num_ok for run in runs), high=0)
    for name, values in errors.items():
        bench.check(f"median error of {name}", statistics.median(map(abs, values)), high=0.25)
    bench.check("median error of goodput", statistics.median(gaps(pairs, SHARES["goodput, share"])), high=0.1)
    for model in dict.fromkeys(pair.case.model for pair in pairs):
        shared = {pair.case.router: pair for pair in pairs if pair.case[:2] == (model, SYSTEM_PROMPT)}
        if {"prefix_aware", "round_robin"} <= shared.keys():
            both = [shared[router].figures(FIGURES["TTFT P99, ms"])[0] for router in ("prefix_aware", "round_robin")]
            bench.check(f"{model}, {SYSTEM_PROMPT}: TTFT P99 of prefix_aware over round_robin", both[0] / both[1], high=1.25)


def error(pair: Pair, figure: Callable[[Summary], float]) -> float:
    """Returns by how much a prediction is too large, as a share of what was measured."""
    measured, predicted = pair.figures(figure)
    return predicted / max(1e-9, measured) - 1.0


def gaps(pairs: Sequence[Pair], figure: Callable[[Summary], float]) -> list[float]:
    """Returns the differences of shares."""
    return [abs(measured - predicted) for measured, predicted in (pair.figures(figure) for pair in pairs)]


def spread_of_runs(pair: Pair, figure: Callable[[Summary], float]) -> float:
    """Returns how far measured runs of one case are from their median, at most, as a share of it."""
    values = [figure(run.summary) for run in pair.measured]
    middle = statistics.median(values)
    return max(abs(value - middle) for value in values) / max(1e-9, middle)


def far_ends(values: Sequence[float], form: str) -> tuple[str, str]:
    """Returns the P90 and the largest by size."""
    ordered = sorted(values, key=abs)
    return form.format(ordered[int(0.9 * (len(ordered) - 1))]), form.format(ordered[-1])


def plot(path: Path, model: str, pairs: Sequence[Pair]) -> None:
    """Draws the runs of a model: a row of panels for each workload, a bar for each measured figure, a line where predicted."""
    workloads = list(dict.fromkeys(pair.case.workload for pair in pairs))
    figures = {name: FIGURES[name] for name in ("TTFT P50, ms", "TTFT P99, ms", "TBT P99, ms")}
    figures["goodput, share"] = SHARES["goodput, share"]
    routers = list(dict.fromkeys(pair.case.router for pair in pairs))
    title = f"{model} on two replicas: measured (bars), predicted in virtual time (lines)"
    with draw(path, title, len(workloads), len(figures), size=(3.4, 2.6)) as axes:
        for panel, (workload, (name, figure)) in zip(axes, product(workloads, figures.items()), strict=True):
            panel.set_title(f"{workload}: {name}", fontsize=9)
            for pair in (pair for pair in pairs if pair.case.workload == workload):
                is_mixed = pair.case.layout == MIXED
                place = routers.index(pair.case.router) + (-0.2 if is_mixed else 0.2)
                measured, predicted = pair.figures(figure)
                panel.barh(place, measured, 0.36, color=BLUE if is_mixed else ORANGE)
                panel.plot([predicted, predicted], [place - 0.19, place + 0.19], color="black", linewidth=2)
            panel.set_yticks(range(len(routers)), routers if name == next(iter(figures)) else [""] * len(routers))
            panel.invert_yaxis()
        bars = [Patch(color=colour, label=layout) for colour, layout in zip((BLUE, ORANGE), LAYOUTS, strict=True)]
        axes[0].figure.legend(handles=bars, loc="upper right", ncols=2)


def _spread(run: Summary, latency: str, percentile: str) -> float:
    spread = getattr(run, latency)
    return 0.0 if spread is None else float(getattr(spread, percentile)) * 1e3


def main() -> int:
    parser = make_parser(__doc__, traces=(MOONCAKE, AZURE))
    parser.add_argument("--models", default=",".join(SCALES), help="with commas")
    parser.add_argument("--routers", default=",".join(ROUTERS.names()), help="with commas")
    parser.add_argument("--seconds", type=float, default=3.5, help="of each run, until the last request is sent")
    parser.add_argument("--load", type=float, default=0.7, help="share of both replicas' time that requests take")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that engines, front and client share, as predicted")
    parser.add_argument("--kv-memory-mb", type=float, default=512.0, help="of each replica")
    parser.add_argument("--repeats", type=int, default=1, help="quiet runs of each case that are measured")
    parser.add_argument("--keep", type=Path, help="file of JSON lines with what was measured, which is not measured again")
    parser.add_argument(
        "--recalibrate", action="store_true", help="measure costs again, for predictions of runs that were kept"
    )
    parser.add_argument(
        "--sitting-s", type=float, help="only measure, and begin no run after so many seconds; exits with 3 if any is left"
    )
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
    depends = [options.seed, options.load, options.seconds, options.kv_memory_mb, [SYSTEM_TOKENS, MIN_REQUESTS, MAX_LEN]]
    try:
        record = Record(options.keep, hashlib.sha256(msgspec.json.encode(depends)).hexdigest()[:16])
    except KeptFileError as error:
        parser.error(f"--keep: {error}")
    is_complete = measure_all(options, record)
    if options.sitting_s is not None:
        console.print(
            "all runs are measured" if is_complete else "there was no time for all runs: sit again to measure the rest"
        )
        return 0 if is_complete else SIT_AGAIN
    pairs = predict_all(options, record, bench)
    bench.figures["runs"] = [describe(pair) for pair in pairs]
    show(bench, pairs)
    for model in dict.fromkeys(pair.case.model for pair in pairs):
        plot(
            options.images / f"cluster-traces-{model.replace(':', '-')}.png",
            model,
            [pair for pair in pairs if pair.case.model == model],
        )
    return bench.finish(options)


def describe(pair: Pair) -> dict[str, Any]:
    """Returns all runs of a case as JSON values."""

    def list_figures(run: Run) -> dict[str, float]:
        figures = {name: round(figure(run.summary), 4) for name, figure in (FIGURES | SHARES).items()}
        return figures | {"busiest, share": round(run.busiest, 3)}

    measured = [list_figures(run) | {"other programs, share": round(run.others, 3)} for run in pair.measured]
    return {**pair.case._asdict(), "measured": measured, "predicted": list_figures(pair.predicted)}


if __name__ == "__main__":
    sys.exit(main())
