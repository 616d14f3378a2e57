"""`cloister plan`: recommends a deployment for a load, predicted in virtual time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from cloister.bench.settings import ArrivalsConfig, ObjectiveConfig, WorkloadConfig
from cloister.cli.console import err, make_progress, print_json, print_line, print_table
from cloister.cli.options import GivenSettings, with_settings
from cloister.types.errors import ConfigError
from cloister.types.refusals import Refusals
from cloister.types.text_files import read_text_file

if TYPE_CHECKING:
    from cloister.bench.report import Spread
    from cloister.cluster.virtual.placement import ReplicaPlacement, StepProfile

ESTIMATE_AFTER_S: Final = 2.0
"""Running time after which the remaining time can be estimated."""
LONG_S: Final = 5.0

app = typer.Typer(help="Choose the roles of replicas for a load, predicted in virtual time.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `placement` a verb of its own."""


@app.command()
@with_settings(WorkloadConfig, ArrivalsConfig, ObjectiveConfig, config_file=False)
def placement(
    settings: GivenSettings,
    profile: Annotated[
        list[Path],
        typer.Option(help="Measured times of replicas with one number of threads; repeat for other numbers.", metavar="FILE"),
    ],
    threads: Annotated[int, typer.Option(help="Threads that all replicas share.", min=1)],
    router: Annotated[str, typer.Option(help="Router of prompts and of answers.")] = "least_load",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find how many replicas should prefill, decode, or do both, and with how many threads, for the most goodput.

    Goodput is the requests per second that keep the limits, at the arrival times of the workload. Profiles are written by
    `python -m benchmarks.cluster_costs`, in a checkout of the repository.
    """
    from cloister.bench.placement import VOCAB_SIZE, predict, rank
    from cloister.bench.report import LatencyObjective
    from cloister.bench.workloads import load_workload
    from cloister.cluster.routers import ROUTERS
    from cloister.cluster.virtual.placement import list_placements

    limits, work = settings.resolve(ObjectiveConfig), settings.resolve(WorkloadConfig)
    ttft_s, tbt_s = (None if ms is None else ms / 1e3 for ms in (limits.slo_ttft_ms, limits.slo_tbt_ms))
    with Refusals() as refusals:
        with refusals.collect("router"):
            ROUTERS.get(router)
        if ttft_s is None and tbt_s is None:
            refusals.add(ConfigError("goodput needs a limit; give --slo-ttft-ms, --slo-tbt-ms, or both", param="slo_ttft_ms"))
        placements: list[ReplicaPlacement] = []
        with refusals.collect("profile"):
            placements = list_placements([_read_profile(path) for path in profile], threads)
        # without a profile only whether the workload can be read
        longest = min((each.profile.max_model_len for each in placements), default=1 << 31)
        with refusals.collect("trace"):
            workload = load_workload(work, settings.resolve(ArrivalsConfig), max_model_len=longest, vocab_size=VOCAB_SIZE)
            if any(isinstance(item.prompt, str) for item in workload.items):
                raise ConfigError("this trace has prompts as text; give one with lengths of prompts and answers", param="trace")
    predicted = []
    goal = LatencyObjective(ttft_s, tbt_s)
    for each in _show_progress(placements):
        predicted.append((each, predict(each, workload.items, goal, router, num_warmup=work.num_warmup, seed=work.seed)))
    ranked = rank(predicted)
    best, outcome = ranked[0]
    if as_json:
        print_json([{"flags": each.flags(router), **summary.to_json()} for each, summary in ranked])
        return
    rows = [
        (
            each.words,
            each.profile.num_threads,
            f"{summary.goodput_rps or 0.0:.2f}",
            f"{100 * (summary.slo_share or 0.0):.0f}%",
            _milliseconds(summary.ttft),
            _milliseconds(summary.tbt),
        )
        for each, summary in ranked
    ]
    title = f"{workload.name}, {len(workload.items)} requests, {ranked[0][1].slo}, {router}"
    headers = ("Replicas", "Threads each", "Goodput, req/s", "Within limits", "P99 TTFT, ms", "P99 TBT, ms")
    print_table(title, headers, rows)
    if not outcome.goodput_rps:
        raise ConfigError(
            "no placement keeps the limits for any request; give looser ones, fewer requests a second, or more --threads",
            param="slo_ttft_ms",
        )
    print_line(f"cloister serve {best.flags(router)}")
    if not best.profile.model:
        err.print("the profile does not name its model; give it yourself: cloister serve MODEL ...", soft_wrap=True)


def _show_progress(placements: Sequence[ReplicaPlacement]) -> Iterator[ReplicaPlacement]:
    """Yields placements with a progress bar; without a terminal, prints one line with the expected time if it is long."""
    started_s = time.monotonic()
    is_announced = err.is_terminal
    with make_progress() as progress:
        for number, each in enumerate(progress.track(placements, description="placements")):
            elapsed_s = time.monotonic() - started_s
            if number and not is_announced and elapsed_s > ESTIMATE_AFTER_S:
                is_announced = True
                left_s = elapsed_s / number * (len(placements) - number)
                if left_s > LONG_S:
                    words = (
                        f"{len(placements)} placements; some {left_s:.0f} s more (fewer --threads or larger replicas take less)"
                    )
                    err.print(words, markup=False, highlight=False, soft_wrap=True)
            yield each


def _milliseconds(spread: Spread | None) -> str:
    return "none" if spread is None else f"{1e3 * spread.p99:.1f}"


def _read_profile(path: Path) -> StepProfile:
    """Reads a profile. Raises ConfigError if the file holds none."""
    from cloister.cluster.virtual.placement import StepProfile

    try:
        return msgspec.json.decode(read_text_file(path, param="profile"), type=StepProfile)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a profile of a replica: {error}; write one with python -m benchmarks.cluster_costs"
        ) from None
