"""Cloister and every installed peer on the same work, in turn, in one session, beside what the machine allows.

python -m benchmarks.peers --peers DIR --shapes q05,l1b
python -m benchmarks.peers --only cloister              needs no peers; makes the models itself
python -m benchmarks.peers --isa avx2,bf16              as processors with no more than that would do, where this one has more
python -m benchmarks.peers --peers DIR --resume         measures again what others disturbed, or what is missing
python -m benchmarks.peers --peers DIR --report-only    writes tables and plot again from what was measured last
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from benchmarks.harness import ROOT, console, make_parser, make_progress
from benchmarks.models import MODELS, ModelUnavailable
from benchmarks.peers.isa import InstructionSet, are_for_one_processor, list_usable
from benchmarks.peers.ledger import Ledger, Run
from benchmarks.peers.meter import NO_SESSION, await_idle
from benchmarks.peers.process import WorkerError, run_worker
from benchmarks.peers.report import write_report
from benchmarks.peers.roster import Entrant, Roster
from benchmarks.peers.shapes import KNOWN, Shape, write_checkpoint
from benchmarks.peers.work import BASE, FIGURES, LIMITS
from cloister.backends.native import _native
from cloister.engine.machine import read_machine

_ROOM = 256
"""Positions more than the longest sequence, for blocks that are not full."""


def main() -> int:
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    num_threads = options.num_threads or read_machine().num_cpus
    roster = Roster(options.peers, num_threads, options.formats, options.setting, options.isa, options.best_isa)
    shapes = [open_shape(roster, name, options.seed) for name in options.shapes]
    ledger = Ledger.load(options.ledger) if options.report_only else Session(options, roster).measure(shapes)
    return write_report(options, ledger, roster, shapes)


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    scratch = ROOT / "build" / "peers"
    parser.add_argument("--peers", type=Path, default=scratch, help="folder of the peers")
    parser.add_argument(
        "--shapes", type=split, default=["q05", "l1b"], help=f"folders of models inside it, or public ones: {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--formats",
        type=split,
        default=["bf16", "int8", "int4", "gguf"],
        help="our number formats, and of peers those of as many bits; gguf is a public model's file as it is",
    )
    parser.add_argument("--isa", type=split, default=[], help="instruction sets; unset, the best that this processor has")
    parser.add_argument("--only", type=split, default=[], help="measure these only, such as cloister, or 'openvino int8'")
    parser.add_argument(
        "--figures", type=split, default=list(FIGURES), help=f"measure these only; memory takes {', '.join(BASE)} with it"
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that everybody's turn comes")
    parser.add_argument("--num-samples", type=int, default=1, help="of each figure in a turn, at least")
    parser.add_argument("--backend", default="native", help="our back end")
    parser.add_argument("--setting", action="append", default=[], help="NAME=VALUE, a setting of our engine")
    parser.add_argument("--max-attempts", type=int, default=3, help="at a figure while others disturb it")
    parser.add_argument("--patience-s", type=float, default=20.0, help="wait for an idle machine before each figure")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="longest wait for a figure")
    parser.add_argument("--ledger", type=Path, default=scratch / "ledger.json", help="file of everything measured")
    parser.add_argument("--name", default="peers", help="of the files with tables and plot")
    parser.add_argument("--resume", action="store_true", help="measure only what the ledger lacks undisturbed")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if unknown := set(options.figures) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    if "memory" in options.figures:
        options.figures += [name for name in BASE if name not in options.figures]
    usable = {isa.name: isa for isa in list_usable()}
    options.best_isa = list(usable.values())[-1]
    if unknown := set(options.isa) - set(usable):
        parser.error(f"this processor has no {', '.join(sorted(unknown))}; it has {', '.join(usable)}")
    options.isa = [usable[name] for name in options.isa] or [options.best_isa]
    if options.isa != [options.best_isa] and are_for_one_processor(_native.kernel_names(), list(usable.values())):
        console.print(
            "our kernels were compiled for this processor alone: those for AVX2 take up to 2.4 times the time that "
            "they should, and others are missing; `make install ISA=all` compiles them for every processor",
            style="yellow",
        )
    options.peers = options.peers.expanduser().resolve()
    options.setting = {"backend": options.backend, **dict(read_setting(text) for text in options.setting)}
    return options


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def read_setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


def open_shape(roster: Roster, name: str, seed: int) -> Shape:
    """Returns a shape, whose checkpoint is made, or fetched, if it is not there."""
    try:
        with console.status(f"opening {name}"):
            folder = roster.files(name).checkpoint
    except ModelUnavailable as error:
        raise SystemExit(f"{name}: {error}") from None
    if not (folder / "config.json").exists():
        if name not in KNOWN:
            raise SystemExit(f"there is no model at {folder}, and only {', '.join(KNOWN)} can be made here")
        with console.status(f"making a checkpoint of random weights: {folder}"):
            write_checkpoint(name, folder, seed)
    return Shape.read(name, folder)


class Session:
    """Measures everybody, one at a time, round after round."""

    def __init__(self, options: argparse.Namespace, roster: Roster) -> None:
        self._options = options
        self._roster = roster
        is_begun = options.resume and options.ledger.exists()
        self._ledger = Ledger.load(options.ledger) if is_begun else Ledger(options.ledger)
        self._ledger.failures.clear()
        self._logs = options.ledger.parent / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def measure(self, shapes: Sequence[Shape]) -> Ledger:
        for shape in shapes:
            if missing := self._roster.missing(shape):
                console.print(f"{shape.name}: not here, left out: {', '.join(missing)}", style="yellow")
            self._measure_shape(shape)
        return self._ledger

    def _measure_shape(self, shape: Shape) -> None:
        entrants = [entrant for entrant in self._roster.entrants(shape) if self._takes_part(entrant)]
        with make_progress() as progress:
            total = self._options.rounds * (len(entrants) + len(self._roster.isas))
            task = progress.add_task(shape.name, total=total)
            for number in range(self._options.rounds):
                for isa in self._roster.isas:
                    held = [entrant for entrant in entrants if entrant.isa == isa.name]
                    self._measure_round(shape, isa, held, number, progress, task)
                self._measure_first_tokens(shape, entrants, number, progress, task)

    def _measure_round(
        self, shape: Shape, isa: InstructionSet, entrants: list[Entrant], number: int, progress: Progress, task: TaskID
    ) -> None:
        """Gives everybody on one instruction set a turn, after what sets the limits there."""
        self._take_turn(shape, self._roster.limits(shape, isa), list(LIMITS), number, progress, task)
        # Another one begins each round, so that nobody always runs after the same neighbour.
        start = number % max(len(entrants), 1)
        for entrant in entrants[start:] + entrants[:start]:
            wanted = [name for name in entrant.figures if name in self._options.figures]
            usual = [name for name in wanted if FIGURES[name].positions <= entrant.launch.context]
            self._take_turn(shape, entrant, usual, number, progress, task)
            longer = [name for name in wanted if name not in usual and FIGURES[name].positions <= shape.max_positions]
            if longer:
                self._take_turn(shape, _with_room(entrant, longer), longer, number, progress, task, is_turn=False)

    def _takes_part(self, entrant: Entrant) -> bool:
        only = self._options.only
        return not only or any(f"{entrant.name} ".startswith(f"{name} ") for name in only)

    def _measure_first_tokens(
        self, shape: Shape, entrants: Sequence[Entrant], number: int, progress: Progress, task: TaskID
    ) -> None:
        """Starts everybody once more, files in the page cache."""
        if "first_token" not in self._options.figures:
            return
        started = [entrant for entrant in entrants if not entrant.launch.engine.endswith("-http")]
        if any(entrant.peer == "cloister" for entrant in entrants):
            started.append(self._roster.embedded(shape))
        for entrant in started:
            way = entrant.first if entrant.launch.engine == "llama" else entrant
            if way is None:
                continue
            for _ in range(self._options.max_attempts):
                await_idle(NO_SESSION, self._options.patience_s)
                self._take_turn(shape, way, ["first_token"], number, progress, task, is_turn=False)
                failed = f"{shape.name}/{way.name}" in self._ledger.failures
                if failed or self._ledger.num_undisturbed(shape.name, way.name, "first_token") > number:
                    break

    def _take_turn(
        self,
        shape: Shape,
        entrant: Entrant,
        figures: Sequence[str],
        number: int,
        progress: Progress,
        task: TaskID,
        *,
        is_turn: bool = True,
    ) -> None:
        """Runs one worker and keeps what it measures; one that failed is not asked again."""
        place = f"{shape.name}/{entrant.name}"
        figures = self._list_wanted(shape, entrant, figures, number)
        if figures and place not in self._ledger.failures:
            try:
                self._run(shape, entrant, figures, number, progress, task)
            except WorkerError as error:
                self._ledger.failures[place] = str(error)
                console.print(f"{place}: {error}", style="red", highlight=False, markup=False)
        progress.advance(task, 1 if is_turn else 0)

    def _list_wanted(self, shape: Shape, entrant: Entrant, figures: Sequence[str], number: int) -> Sequence[str]:
        """Returns the figures that the ledger lacks undisturbed; peak memory needs all the work to be a peak."""
        count = self._ledger.num_undisturbed
        wanted = [name for name in figures if count(shape.name, entrant.name, name) <= number]
        if "memory" not in wanted:
            return wanted
        return list(dict.fromkeys((*figures, *wanted)))

    def _run(
        self, shape: Shape, entrant: Entrant, figures: Sequence[str], number: int, progress: Progress, task: TaskID
    ) -> None:
        label = f"{shape.name}, round {number + 1}: {entrant.name}"
        progress.update(task, description=label)
        reports = run_worker(
            entrant.python,
            entrant.launch,
            figures,
            num_samples=self._options.num_samples,
            seed=self._options.seed + number,
            max_attempts=self._options.max_attempts,
            patience_s=self._options.patience_s,
            timeout_s=self._options.timeout_s,
            environment=entrant.environment,
            log=self._logs / f"{shape.name}-{entrant.name.replace(' ', '-')}.log",
        )
        for report in reports:
            if report["kind"] == "figure":
                name, samples = report["name"], report["samples"]
                self._ledger.add(Run(shape.name, entrant.name, name, number, samples, report["other_cores"]))
                progress.update(task, description=f"{label}, {name} {samples[-1]:.3g}")
            elif report["kind"] == "done":
                self._ledger.notes[f"{shape.name}/{entrant.name}"] = report["notes"]


def _with_room(entrant: Entrant, figures: Sequence[str]) -> Entrant:
    """Returns an engine started with room for figures that need more than is usual; the others' memory is taken without it."""
    positions = max(FIGURES[name].positions for name in figures)
    launch = replace(entrant.launch, context=positions, kv_tokens=max(entrant.launch.kv_tokens, positions + _ROOM))
    return replace(entrant, launch=launch)


if __name__ == "__main__":
    sys.exit(main())
