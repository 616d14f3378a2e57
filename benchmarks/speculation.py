"""What drafting brings: every drafter and `auto` over none, on five kinds of text, alone and with 4 and 16 sequences at once.

    python -m benchmarks.speculation --model DIR            # the whole table; run again, it goes on where it was stopped
    python -m benchmarks.speculation --model DIR --quick    # two rounds of three cells: whether all of it works
    python -m benchmarks.speculation --report-only          # tables and plot again

The model is cloister-5m in the shape of Llama 3.2 1B (`benchmarks.inflated`; it is written to DIR if it is not there): drafts
are accepted as they are for the model, and a step costs what a billion weights cost. In each round every engine answers the
same prompts, in an order that turns; a pair is a drafter's run and the one of `none` in the same round. Time per token is
that after the step in which the last answer of a batch began, to the end of its last answer; "while all ran" ends before the
step in which the first one ended, which is how a server with a queue goes on. Intervals are of the mean logarithm of the
pairs' ratios (t, 95%).

Predicted, by counting. A step of one row reads 0.98 billion weights: 34 ms in int8 and 68 ms in bf16 at the 28.8 GB/s that
this machine reads. 16 rows multiply 2 x 0.98e9 x 16 = 31 GFLOP, 8 ms at 3.9 TFLOP/s, below that: verifying up to 16 rows is
nearly free, and from about 70 rows in int8 a step is bound by arithmetic. The draft model is right on 56% of answers, so a
chain of 4 brings (1 - 0.56^5) / 0.44 = 2.1 tokens a step for 4 x 0.2 ms: about 2.0x at batch 1; trees 2.3x to 2.6x. At 16
sequences 4 drafts each are 80 rows, about 1.7 times one row of each: 1.2x, and less with trees. An edit of 27 tokens needs a
draft up to the changed word, one for it, and one behind it: 4 or 5 steps for 26 tokens, 5x for n-grams at any batch. Random
text: nothing is foreseen, 1.0x.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, console, make_parser, make_progress
from benchmarks.inflated import open_inflated
from benchmarks.speculation_cost import list_rows, measure_costs
from benchmarks.speculation_report import report
from benchmarks.speculation_runs import AUTO, DRAFTERS, PLAIN, Arm, Run, open_arms, share_weights
from benchmarks.speculation_workloads import Prompts, Workload

ARMS: Final = (PLAIN, *DRAFTERS, AUTO)
EXACT: Final = 2
"""Raise it when cells measured before do not count any more."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One place in the table.

    Attributes:
        prompts: of each round; at least as many as the batch.
    """

    quant: str
    workload: str
    batch: int
    prompts: int = 0

    @property
    def name(self) -> str:
        return f"{self.quant} / {self.workload} / {self.batch}"


def list_cells() -> list[Cell]:
    """Returns every cell, what matters most first: a run may be stopped at any time."""
    main = ("docs", "edit", "random", "code", "text")
    cells = [Cell("int8", "docs", 1, 2), *(Cell("int8", name, 1, 1) for name in main[1:])]
    cells += [Cell("int8", name, batch, batch) for batch in (16, 4) for name in main[:-1]]
    cells += [Cell("int8", name, 1, 2) for name in ("docs, T 1, seed", "docs, T 1, no seed")]
    return cells + [Cell("none", name, batch, max(batch, 2)) for batch in (1, 16) for name in ("docs", "edit")]


QUICK: Final = (Cell("int8", "docs", 1, 1), Cell("int8", "edit", 1, 1), Cell("int8", "docs", 4, 4))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="where the inflated model is, or shall be written; cloister-5m: that itself")
    parser.add_argument("--arms", default=",".join(ARMS), help="what to measure; `none` is always measured")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of each cell")
    parser.add_argument("--draft-tokens", type=int, default=None, help="drafts of a step; unset, as many as pay")
    parser.add_argument("--datastore", help="directory of `rest`")
    parser.add_argument("--quick", action="store_true", help="two rounds of three cells, kept apart")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    parser.add_argument("--report-only", action="store_true", help="print what was measured before")
    options = parser.parse_args()
    kept = Kept(options.output / ("speculation_quick_cells.json" if options.quick else "speculation_cells.json"))
    if not options.report_only:
        if options.model is None:
            parser.error("--model DIR is needed, where the inflated model is or shall be written (2 GB)")
        measure(options, kept)
    bench = Bench("speculation_quick" if options.quick else "speculation", "Speculation on the inflated pair", prediction())
    return report(bench, kept.cells, options)


def prediction() -> str:
    return " ".join((__doc__ or "").partition("Predicted, by counting. ")[2].split())


class Kept:
    """What was measured, in a file that is written after every cell.

    Attributes:
        cells: name -> {"cell", "rounds", "missing", "unequal", "arms": name -> [figures of each round]}; "cost QUANT" -> rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cells: dict[str, Any] = {}
        if path.exists():
            self.cells = json.loads(path.read_text(encoding="utf-8"))

    def keep(self, name: str, found: Any) -> None:
        self.cells[name] = found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.cells) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace, kept: Kept) -> None:
    """Measures the cells that are not there yet, format by format."""
    folder = open_inflated(options.model)
    workloads = Prompts(folder).all()
    share_weights()
    names = [PLAIN, *(name for name in options.arms.split(",") if name != PLAIN)]
    rounds = 2 if options.quick else options.rounds
    wanted = [cell for cell in (QUICK if options.quick else list_cells()) if options.only in cell.name]
    missing_cells = [cell for cell in wanted if options.fresh or not is_whole(kept.cells.get(cell.name), names, rounds)]
    datastore = options.datastore or next((str(path) for path in folder.glob("drafters/rest") if path.is_dir()), None)
    settings: dict[str, object] = {"draft_tokens": options.draft_tokens, "datastore": datastore}
    settings |= {"num_threads": options.num_threads}
    settings = {name: value for name, value in settings.items() if value is not None}
    for quant in dict.fromkeys(cell.quant for cell in missing_cells):
        arms, missing = open_arms(names, folder, quant, settings)
        for name, why in missing.items():
            console.print(f"[yellow]{name} is left out:[/] {why}", highlight=False)
        for cell in (cell for cell in missing_cells if cell.quant == quant):
            found = measure_cell(cell, workloads[cell.workload], arms, rounds)
            kept.keep(cell.name, found | {"missing": [name for name in names if name not in arms]})
        costs = measure_costs(arms[PLAIN], 3 if options.quick else 10)
        kept.keep(f"cost {quant}", [list(row) for row in list_rows(costs)])
        arms.clear()


def is_whole(found: Any, names: list[str], rounds: int) -> bool:
    """Tells whether a cell has every arm that can be had, and enough rounds."""
    if not found or found["version"] != EXACT:
        return False
    return all(len(found["arms"].get(name, ())) >= rounds or name in found["missing"] for name in names)


def measure_cell(cell: Cell, workload: Workload, arms: dict[str, Arm], rounds: int) -> dict[str, Any]:
    """Answers prompts with every engine in turn, round after round; the first round warms up and does not count."""
    since_s = time.perf_counter()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    unequal: dict[str, int] = dict.fromkeys(arms, 0)
    order = list(arms)
    with make_progress() as progress:
        for turn in progress.track(range(rounds + 1), description=cell.name):
            numbers = [(turn * cell.prompts + place) % len(workload.prompts) for place in range(cell.prompts)]
            runs: dict[str, Run] = {}
            for name in [name for name in order if name in arms]:
                try:
                    runs[name] = arms[name].answer(workload, numbers, cell.batch)
                except Exception as error:
                    if name == PLAIN:
                        raise
                    console.print(f"[red]{name} failed and is left out from now on:[/] {error!r}", highlight=False)
                    del arms[name], found[name], unequal[name]
            order = order[1:] + order[:1]
            for name, run in runs.items():
                unequal[name] += workload.is_settled and run.answers != runs[PLAIN].answers
                if turn:
                    found[name].append(run.figures())
    told = ", ".join(f"{name} {speed(found[name]) / speed(found[PLAIN]):.2f}" for name in arms if name != PLAIN)
    took_s = time.perf_counter() - since_s
    console.print(f"{cell.name} ({took_s:.0f} s): none {speed(found[PLAIN]):.1f} tokens/s; over it: {told}", highlight=False)
    return {"cell": asdict(cell), "version": EXACT, "rounds": rounds, "unequal": unequal, "arms": found}


def speed(runs: list[dict[str, Any]]) -> float:
    """Returns tokens a second over all rounds."""
    return float(sum(run["tokens"] for run in runs) / sum(run["decode_s"] for run in runs))


if __name__ == "__main__":
    raise SystemExit(main())
