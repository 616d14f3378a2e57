"""What every benchmark shares: options, an engine, tables, checks, and the files that a run leaves."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cloister.bench.traces import Trace, TraceRow, read_trace
from cloister.bench.workloads import iter_lengths
from cloister.cli.console import print_table
from cloister.engine import EngineCore
from cloister.engine.machine import read_machine

ROOT = Path(__file__).parents[1]
MODEL = "cloister-5m"
CONTEXT_TOKENS = 8192
AZURE = "azure_llm_2023_conv.csv.gz"
MOONCAKE = "mooncake_fast25_conversation.jsonl.gz"

FILE_COLUMNS = 160
"""Width of what is written to a file or a pipe, where nothing has to wrap."""

console = Console() if Console().is_terminal else Console(width=FILE_COLUMNS)


def make_parser(about: str | None, traces: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Returns a parser of the options that every benchmark has.

    Args:
        traces: files that the benchmark reads; it refuses a folder without them before it measures anything. None: it has no
            option `--traces`.
    """
    summary = (about or "").split("\n\n", 1)[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if traces is not None:
        # a default that is text is checked too
        folder = str(ROOT.parent / "shared" / "traces")
        parser.add_argument("--traces", type=partial(find_traces, names=traces), default=folder, help="folder of the traces")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the JSON")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--num-threads", type=int, default=None, help="threads of the engine; unset, all that it may use")
    return parser


def find_traces(folder: str, names: Sequence[str]) -> Path:
    """Returns a folder that has these traces.

    Raises:
        argparse.ArgumentTypeError: it lacks one.
    """
    for name in names:
        if not (Path(folder) / name).is_file():
            raise argparse.ArgumentTypeError(
                f"no trace file at {Path(folder) / name}; name the folder that has it (docs/bench.md says where it is from)"
            )
    return Path(folder)


def open_engine(options: argparse.Namespace, **settings: object) -> EngineCore:
    """Returns an engine core of the embedded model, set as a server's, that this thread steps itself.

    Args:
        settings: as in EngineConfig.
    """
    from cloister.launch import build_engine, resolve_settings

    flags = {"model": MODEL, "num_threads": options.num_threads, "prefix_cache": False, **settings}
    return build_engine(resolve_settings(flags).engine.config)


def make_progress() -> Progress:
    """Returns a progress bar that is gone when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def read_azure(options: argparse.Namespace) -> Trace:
    """Returns the Azure conversation trace (CC-BY 4.0, Patel et al., ISCA 2024)."""
    return read_trace(options.traces / AZURE)


def find_scale(rows: Sequence[TraceRow], num_tokens: int) -> Fraction:
    """Returns the largest factor of the form 1 or 1/k with which every row fits into `num_tokens`."""
    divisor = 1
    while max(sum(lengths) for lengths in iter_lengths(rows, Fraction(1, divisor))) > num_tokens:
        divisor += 1
    return Fraction(1, divisor)


@dataclass(slots=True)
class Bench:
    """One benchmark as it is told: prediction first, then what was measured, then whether it held.

    Attributes:
        name: of the files that it leaves.
        figures: everything measured, as JSON values.
        checks: (what, bound, measured, held).
    """

    name: str
    title: str
    prediction: str
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        console.rule(f"[bold]{self.title}", align="left")
        console.print(f"[bold]Predicted:[/] {self.prediction}", highlight=False)

    def print_rows(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Prints a table and keeps it among the figures."""
        shown = [[f"{cell:,.4g}" if isinstance(cell, float) else cell for cell in row] for row in rows]
        print_table(title, headers, shown, console)
        self.figures[title] = [dict(zip(headers, row, strict=True)) for row in rows]

    def check(self, what: str, measured: float, *, low: float | None = None, high: float | None = None) -> None:
        """Judges one figure against its bound."""
        held = (low is None or measured >= low) and (high is None or measured <= high)
        sign = "=" if low == high else ">=" if low is not None else "<="
        bound = f"{sign} {low if low is not None else high:,.4g}"
        self.checks.append((what, bound, f"{measured:,.4g}", held))

    def check_true(self, what: str, held: bool) -> None:
        """Judges something that holds or does not."""
        self.checks.append((what, "holds", "holds" if held else "does not", held))

    def finish(self, options: argparse.Namespace) -> int:
        """Prints the verdicts and writes the JSON; returns the exit status, 1 if a check did not hold."""
        rows = [(what, bound, measured, "held" if held else "missed") for what, bound, measured, held in self.checks]
        print_table("Checks", ("check", "wanted", "measured", ""), rows, console)
        self._write(options)
        return 0 if all(held for *_, held in self.checks) else 1

    def _write(self, options: argparse.Namespace) -> None:
        machine = read_machine()
        checks = [{"what": w, "wanted": b, "measured": m, "held": h} for w, b, m, h in self.checks]
        content = {
            "title": self.title,
            "prediction": self.prediction,
            "checks": checks,
            "figures": self.figures,
            "machine": {"cpus": machine.num_cpus, "architecture": platform.machine(), "python": platform.python_version()},
            "seed": options.seed,
        }
        path = Path(options.output) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"Written: {path}", style="dim", highlight=False)
