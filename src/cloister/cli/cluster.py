"""`cloister cluster`: searches for faults that several replicas do not survive."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cloister.cli.console import err, leave, make_folder, make_progress, print_line
from cloister.types.errors import ConfigError

if TYPE_CHECKING:
    from cloister.cluster.virtual.fuzz import SeedTally

app = typer.Typer(help="Search for faults that several replicas do not survive.", no_args_is_help=True)
BROKEN: Final = 1
_SEEDS: Final = re.compile(r"(\d+)\.\.(\d+)")


@app.callback()
def _group() -> None:
    """Keeps `fuzz` a verb of its own."""


@app.command()
def fuzz(
    seeds: Annotated[str, typer.Option(help="Seeds to run, the last one excluded.", metavar="A..B")] = "0..1000",
    scenario: Annotated[
        Path | None, typer.Option(help="Run this scenario once instead.", metavar="FILE", dir_okay=False)
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes that share the work.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="Folder for the scenarios that fail.", metavar="DIR")] = Path("fuzz"),
) -> None:
    """Run clusters in virtual time, with requests and faults drawn from seeds, and check that every promise is kept.

    A seed that fails is made small and written as a scenario.
    """
    logging.disable(logging.CRITICAL)  # engines die by the thousand
    try:
        if scenario is not None:
            _run_scenario(scenario)
        else:
            _run_seeds(seeds, processes, output)
    finally:
        logging.disable(logging.NOTSET)


def _run_scenario(path: Path) -> None:
    from cloister.cluster.virtual import fuzz as fuzzer

    violations = fuzzer.replay(fuzzer.read_scenario(path)).violations
    for violation in violations:
        print_line(violation)
    if violations:
        leave(f"{path} broke a promise", BROKEN)
    print_line(f"{path} kept every promise", "green")


def _run_seeds(seeds: str, processes: int, output: Path) -> None:
    from cloister.cluster.virtual import fuzz as fuzzer

    tally = _search(range(*_read_seeds(seeds)), processes)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.faults.items()))
    print_line(f"{tally.num_seeds} seeds, {tally.num_requests} requests, {tally.num_tokens} tokens; faults: {faults or 'none'}")
    for seed in tally.failing:
        make_folder(output)
        path = output / f"{seed}.json"
        found = fuzzer.scenario_of(seed)
        fuzzer.write_scenario(found, path)
        with err.status(f"making seed {seed} smaller"):
            found = fuzzer.shrink(found, lambda smaller: bool(fuzzer.replay(smaller).violations))
        fuzzer.write_scenario(found, path)
        print_line(f"seed {seed}: {fuzzer.replay(found).violations[0]}; run it with --scenario {path}")
    if tally.failing:
        leave(f"{len(tally.failing)} seeds broke a promise", BROKEN)
    print_line("every promise was kept", "green")


def _read_seeds(seeds: str) -> tuple[int, int]:
    found = _SEEDS.fullmatch(seeds)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if first >= last:
        raise ConfigError(
            f"--seeds {seeds} names no seeds; write the first and the one behind the last, such as 0..1000", param="seeds"
        )
    return first, last


def _search(seeds: range, num_processes: int) -> SeedTally:
    from cloister.cluster.virtual import fuzz as fuzzer

    total = fuzzer.SeedTally()
    with make_progress() as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for tally in fuzzer.search(seeds, num_processes):
            total.add(tally)
            progress.update(task, advance=tally.num_seeds, description=f"seeds, {len(total.failing)} failing")
    return total
