"""Tables, checks and the plot of a session."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from matplotlib.axes import Axes

from benchmarks.harness import Bench, console
from benchmarks.peers.judge import GOALS, HTTP, OURS, Verdict, judge
from benchmarks.peers.ledger import Ledger, show
from benchmarks.peers.roster import Entrant
from benchmarks.peers.shapes import Shape
from benchmarks.peers.work import FIGURES, LIMITS
from cloister.bench.plots import COLOURS, GREY, draw

HTTP_GOAL = 0.95
FIRST_TOKEN_GOALS_S = {"embedded": 1.0, "l1b": 2.0}


def write_report(options: argparse.Namespace, ledger: Ledger, rosters: Sequence[tuple[Shape, Sequence[Entrant]]]) -> int:
    """Prints and writes everything; returns 1 if a goal was missed."""
    bench = Bench(
        "peers",
        "Cloister and its peers",
        "against the best peer of equal bits: decode and prefill 1.3 times as fast, many at once 1.5 times, in less memory; "
        "85, 75 and 65% of what the machine allows",
    )
    verdicts = {}
    for shape, entrants in rosters:
        _print_limits(bench, ledger, shape)
        _print_all(bench, ledger, shape, entrants)
        verdicts[shape.name] = list(judge(ledger, shape, entrants))
        _print_verdicts(bench, shape, verdicts[shape.name])
        _check_verdicts(bench, shape, verdicts[shape.name])
        _check_http(bench, ledger, shape, entrants)
        _check_first_token(bench, ledger, shape, verdicts[shape.name])
    bench.figures["runs"] = [asdict(run) for run in ledger.runs]
    bench.figures["notes"], bench.figures["failures"] = ledger.notes, ledger.failures
    for place, why in ledger.failures.items():
        console.print(f"No figures of {place}: {why}", style="red", highlight=False, markup=False)
    console.print("* others were at work beside every run of this figure: repeat it", style="dim")
    _draw(options, bench, verdicts)
    return bench.finish(options)


def _print_limits(bench: Bench, ledger: Ledger, shape: Shape) -> None:
    results = [(limit, ledger.result(shape.name, "limits", limit.name)) for limit in LIMITS.values()]
    rows = [(limit.title, limit.unit, str(result)) for limit, result in results if result is not None]
    bench.print_rows(f"{shape.name}: the machine", ("limit", "unit", "median (range)"), rows)


def _print_all(bench: Bench, ledger: Ledger, shape: Shape, entrants: Sequence[Entrant]) -> None:
    rows = []
    for entrant in sorted(entrants, key=lambda entrant: -entrant.bits):
        results = [ledger.result(shape.name, entrant.name, name) for name in FIGURES]
        if any(results):
            rows.append((entrant.name, *(str(result) if result else "-" for result in results)))
    headers = [f"{figure.title}, {figure.unit}" for figure in FIGURES.values()]
    bench.print_rows(f"{shape.name}: everybody, median (range)", ("engine", *headers), rows)


def _print_verdicts(bench: Bench, shape: Shape, verdicts: Sequence[Verdict]) -> None:
    rows = [
        (
            f"{verdict.figure.title}, {verdict.figure.unit}",
            verdict.number_format,
            str(verdict.ours),
            f"{verdict.best[0]}: {show(verdict.best[1])}" if verdict.best else "-",
            f"{verdict.ratio:.2f}x" if verdict.ratio else "-",
            f"{verdict.share:.0%}" if verdict.share else "-",
        )
        for verdict in verdicts
    ]
    headers = ("figure", "format", "ours", "best peer of equal bits", "times as good", "of the limit")
    bench.print_rows(f"{shape.name}: against the best", headers, rows)


def _check_verdicts(bench: Bench, shape: Shape, verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.figure.kind not in GOALS or not _is_judged(verdict, verdicts):
            continue
        peer_goal, share_goal = GOALS[verdict.figure.kind]
        what = f"{shape.name} {verdict.figure.title}, {verdict.number_format}"
        # At 16 bits a peer is at the wall already: the share says it all.
        if verdict.ratio is not None and not (verdict.figure.kind == "decode" and verdict.number_format == "bf16"):
            bench.check(f"{what}: over the best peer", verdict.ratio, low=peer_goal)
        if verdict.share is not None:
            bench.check(f"{what}: share of the limit", verdict.share, low=share_goal)


def _is_judged(verdict: Verdict, verdicts: Sequence[Verdict]) -> bool:
    """Prefill counts in the best format only."""
    if verdict.figure.kind != "prefill":
        return True
    return all(other.ours.median <= verdict.ours.median for other in verdicts if other.figure == verdict.figure)


def _check_http(bench: Bench, ledger: Ledger, shape: Shape, entrants: Sequence[Entrant]) -> None:
    rows = []
    for entrant in entrants:
        offline = ledger.result(shape.name, f"{OURS} {entrant.number_format}", "together16")
        http = ledger.result(shape.name, entrant.name, "http16")
        if http and offline:
            ratio = http.median / offline.median
            rows.append((entrant.name, str(http), str(offline), f"{ratio:.3f}"))
            if entrant.peer == HTTP:
                bench.check(f"{shape.name} 16 over HTTP, {entrant.number_format}: over offline", ratio, low=HTTP_GOAL)
    bench.print_rows(f"{shape.name}: over HTTP", ("server", "tok/s", "offline, tok/s", "ratio"), rows)


def _check_first_token(bench: Bench, ledger: Ledger, shape: Shape, verdicts: Sequence[Verdict]) -> None:
    embedded = ledger.result(shape.name, f"{OURS} embedded", "first_token")
    if embedded is not None:
        bench.check("embedded model, start to first token, s", embedded.median, high=FIRST_TOKEN_GOALS_S["embedded"])
    if shape.name in FIRST_TOKEN_GOALS_S:
        for verdict in verdicts:
            if verdict.figure.kind == "first_token":
                what = f"{shape.name} {verdict.number_format}, start to first token, s"
                bench.check(what, verdict.ours.median, high=FIRST_TOKEN_GOALS_S[shape.name])


def _draw(options: argparse.Namespace, bench: Bench, verdicts: dict[str, list[Verdict]]) -> None:
    """Draws a panel for each shape, unless there was nobody to compare with."""
    compared = {shape: [v for v in listed if v.ratio is not None] for shape, listed in verdicts.items()}
    compared = {shape: listed for shape, listed in compared.items() if listed}
    if not compared:
        console.print("No plot: it compares us with peers, and one side is missing", style="dim")
        return
    formats = dict.fromkeys(verdict.number_format for listed in compared.values() for verdict in listed)
    colours = dict(zip(formats, COLOURS, strict=False))
    title = "Cloister over the best peer of equal bits (above 1 is better)"
    with draw(bench.picture(options), title, len(compared), 1, (9.6, 3.4)) as panels:
        for axes, (shape, listed) in zip(panels, compared.items(), strict=True):
            _draw_panel(axes, shape, listed, colours)


def _draw_panel(axes: Axes, shape: str, verdicts: Sequence[Verdict], colours: Mapping[str, str]) -> None:
    figures = [figure for figure in FIGURES.values() if any(v.figure == figure for v in verdicts)]
    formats = list(dict.fromkeys(v.number_format for v in verdicts))
    width = 0.8 / len(formats)
    for place, number_format in enumerate(formats):
        mine = [v for v in verdicts if v.number_format == number_format]
        lefts = [figures.index(v.figure) + (place - (len(formats) - 1) / 2) * width for v in mine]
        bars = axes.bar(lefts, [v.ratio or 0.0 for v in mine], width * 0.92, color=colours[number_format], label=number_format)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    for place, figure in enumerate(figures):
        if figure.kind in GOALS:
            axes.hlines(GOALS[figure.kind][0], place - 0.45, place + 0.45, color=GREY, linestyle="dotted", linewidth=1.2)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.margins(y=0.16)
    axes.set_xticks(range(len(figures)), [figure.title for figure in figures])
    axes.set_title(f"{shape} (dotted: the goal)")
    axes.set_ylabel("times as good")
    axes.grid(axis="x", visible=False)
    axes.legend(ncols=len(formats), loc="upper right")
