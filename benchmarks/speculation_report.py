"""Tables, checks and the plot of what `benchmarks.speculation` measured."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy import stats

from benchmarks.harness import Bench, console
from benchmarks.speculation_runs import AUTO, PLAIN
from cloister.bench.plots import BLUE, COLOURS, GREY, draw

FORMATS: Final = {"int8": "int8", "none": "bf16"}
MIN_BEST: Final = 2.0
MIN_COPIED: Final = 3.0
MIN_AUTO: Final = 0.97


@dataclass(frozen=True, slots=True)
class Score:
    """What a drafter did in one cell.

    Attributes:
        ratio, low, high: of tokens a second over `none`, geometric mean of the pairs and its 95% interval.
        full, full_low, full_high: the same while all sequences of a batch ran: whoever comes next takes a place at once on a
            server, but not here, where a batch ends with its slowest answer. 0 where no such step was.
        whole: the same with prompts and first tokens.
        accepted: drafts kept, each time that a sequence was at its turn.
        acceptance: share of the verified drafts that were kept.
        drafting: share of the time that the drafter took.
    """

    ratio: float
    low: float
    high: float
    full: float
    full_low: float
    full_high: float
    whole: float
    tokens_s: float
    accepted: float
    acceptance: float
    drafting: float

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]) -> Score:
        def total(name: str) -> float:
            return sum(run[name] for run in runs)

        ratio, low, high = interval([speed(a) / speed(b) for a, b in zip(runs, plain, strict=False)])
        whole, _, _ = interval(
            [speed(a, "all_tokens", "whole_s") / speed(b, "all_tokens", "whole_s") for a, b in zip(runs, plain, strict=False)]
        )
        ran = [
            speed(a, "full_tokens", "full_s") / speed(b, "full_tokens", "full_s")
            for a, b in zip(runs, plain, strict=False)
            if a["full_s"] and b["full_s"]
        ]
        return cls(
            ratio,
            low,
            high,
            *(interval(ran) if ran else (0.0, 0.0, 0.0)),
            whole,
            total("tokens") / total("decode_s"),
            total("accepted") / max(1, total("samples")),
            total("accepted") / max(1, total("drafted")),
            total("draft_s") / total("decode_s"),
        )

    def told(self) -> str:
        return f"{self.ratio:.2f} ({self.low:.2f}-{self.high:.2f})"

    def told_full(self) -> str:
        return f"{self.full:.2f} ({self.full_low:.2f}-{self.full_high:.2f})" if self.full else "-"


def speed(run: Mapping[str, float], tokens: str = "tokens", seconds: str = "decode_s") -> float:
    return run[tokens] / run[seconds]


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the geometric mean and its 95% interval (t on the logarithms); no interval of one ratio."""
    logs = np.log(ratios)
    middle = float(logs.mean())
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    margin = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs)))
    return math.exp(middle), math.exp(middle - margin), math.exp(middle + margin)


def report(bench: Bench, kept: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Prints tables, checks the targets, draws, writes; returns the exit status."""
    cells = {name: found for name, found in kept.items() if not name.startswith("cost ")}
    scores = {name: score_cell(found) for name, found in cells.items()}
    for quant, told in FORMATS.items():
        if f"cost {quant}" in kept:
            headers = ("sequences", "rows of each", "ms", "over one row of each")
            bench.print_rows(f"a step without drafting, {told}", headers, kept[f"cost {quant}"])
    for name, found in cells.items():
        _print_cell(bench, name, found, scores[name])
    for quant, told in FORMATS.items():
        console.print(
            f"\n{told}, for README.md:\n{to_markdown(cells, scores, quant)}", highlight=False, markup=False, soft_wrap=True
        )
    _check(bench, cells, scores)
    _draw(bench, cells, scores, options)
    return bench.finish(options)


def to_markdown(cells: Mapping[str, Any], scores: Mapping[str, Mapping[str, Score]], quant: str) -> str:
    """Returns a table of a format: a row for each drafter, a column for each cell; ratios, and accepted drafts a step."""
    shown = [name for name, found in cells.items() if found["cell"]["quant"] == quant]
    if not shown:
        return "nothing measured"
    arms = list(dict.fromkeys(arm for name in shown for arm in scores[name]))
    heads = [f"{cells[name]['cell']['workload']}, {cells[name]['cell']['batch']}" for name in shown]
    lines = [f"| over none (accepted a step) | {' | '.join(heads)} |", "|---" * (len(shown) + 1) + "|"]
    for arm in arms:
        found = [scores[name].get(arm) for name in shown]
        plain = [f"{score.tokens_s:.1f} tokens/s" if score else "-" for score in found]
        ratios = [
            f"{score.told()}{f'; {score.told_full()}' if cells[name]['cell']['batch'] > 1 else ''} ({score.accepted:.2f})"
            if score
            else "-"
            for name, score in zip(shown, found, strict=True)
        ]
        lines.append(f"| {arm} | {' | '.join(plain if arm == PLAIN else ratios)} |")
    return "\n".join(lines)


def score_cell(found: Mapping[str, Any]) -> dict[str, Score]:
    plain = found["arms"][PLAIN]
    return {name: Score.of(runs, plain) for name, runs in found["arms"].items() if runs}


def _print_cell(bench: Bench, name: str, found: Mapping[str, Any], scores: Mapping[str, Score]) -> None:
    cell = found["cell"]
    title = f"{cell['workload']}, {FORMATS[cell['quant']]}, batch {cell['batch']}, {found['rounds']} pairs"
    headers = (
        "drafter",
        "over none (95%)",
        "while all ran",
        "with prompts",
        "tokens/s",
        "accepted a step",
        "of drafts",
        "time drafting",
    )
    rows = [
        (
            arm, s.told(), s.told_full(), f"{s.whole:.2f}", f"{s.tokens_s:.1f}",
            f"{s.accepted:.2f}", f"{s.acceptance:.0%}", f"{s.drafting:.1%}",
        )
        for arm, s in scores.items()
    ]  # fmt: skip
    bench.print_rows(title, headers, rows)
    bench.figures.setdefault("unequal answers", {})[name] = found["unequal"]


def _check(bench: Bench, cells: Mapping[str, Any], scores: Mapping[str, Mapping[str, Score]]) -> None:
    for quant, told in FORMATS.items():
        docs = scores.get(f"{quant} / docs / 1", {})
        best = max((name for name in docs if name not in (PLAIN, AUTO)), key=lambda name: docs[name].ratio, default=None)
        if best is not None:
            bench.check(f"docs, {told}, batch 1: the best drafter ({best}) over none", docs[best].ratio, low=MIN_BEST)
        edit = scores.get(f"{quant} / edit / 1", {})
        if "ngram" in edit:
            bench.check(f"edit, {told}, batch 1: n-grams over none", edit["ngram"].ratio, low=MIN_COPIED)
    for name, found in scores.items():
        if AUTO in found:
            bench.check(f"auto over none: {name}", found[AUTO].ratio, low=MIN_AUTO)
            if cells[name]["cell"]["batch"] > 1 and found[AUTO].full:
                bench.check(f"auto over none while all ran: {name}", found[AUTO].full, low=MIN_AUTO)
    unequal = sum(sum(found["unequal"].values()) for found in cells.values())
    bench.check("rounds of greedy and seeded requests with other answers than none's", unequal, low=0, high=0)


def _draw(
    bench: Bench, cells: Mapping[str, Any], scores: Mapping[str, Mapping[str, Score]], options: argparse.Namespace
) -> None:
    shown = [
        name for name, found in cells.items() if found["cell"]["quant"] == "int8" and ", T" not in found["cell"]["workload"]
    ]
    batches = sorted({cells[name]["cell"]["batch"] for name in shown})
    if not shown:
        return
    with draw(bench.picture(options), f"{bench.title}, int8: tokens/s over none", 1, len(batches), size=(6.2, 5.2)) as panels:
        for panel, batch in zip(panels, batches, strict=True):
            here = [name for name in shown if cells[name]["cell"]["batch"] == batch]
            arms = list(dict.fromkeys(arm for name in here for arm in scores[name] if arm != PLAIN))
            for place, name in enumerate(here):
                middle = np.arange(len(arms)) + (place - (len(here) - 1) / 2) * 0.8 / len(here)
                values = [scores[name].get(arm) for arm in arms]
                ratios = [0.0 if s is None else s.ratio for s in values]
                below = [0.0 if s is None else s.ratio - s.low for s in values]
                above = [0.0 if s is None or math.isinf(s.high) else s.high - s.ratio for s in values]
                panel.barh(
                    middle, ratios, 0.8 / len(here), xerr=(below, above), color=(*COLOURS, BLUE)[place],
                    ecolor="#4a5568", label=cells[name]["cell"]["workload"],
                )  # fmt: skip
            panel.axvline(1.0, color=GREY, linewidth=0.8)
            panel.set_yticks(range(len(arms)), arms)
            panel.invert_yaxis()
            panel.set_title(f"{batch} at once" if batch > 1 else "one sequence")
            panel.legend()
