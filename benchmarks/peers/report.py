"""Tables and checks of a session."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.harness import Bench, console
from benchmarks.peers.judge import GOALS, HTTP, OURS, Verdict, judge
from benchmarks.peers.ledger import Ledger, show
from benchmarks.peers.losses import MODEL, Losses, show_loss
from benchmarks.peers.roster import Entrant, Roster
from benchmarks.peers.shapes import Shape
from benchmarks.peers.work import FIGURES, LIMITS

HTTP_GOAL = 0.95
LOSS = f"loss on {MODEL}, %, rms"
FIRST_TOKEN_GOALS_S = {"embedded": 1.0, "l1b": 2.0}


def write_report(options: argparse.Namespace, ledger: Ledger, roster: Roster, shapes: Sequence[Shape]) -> int:
    """Prints and writes everything; returns 1 if a goal was missed."""
    bench = Bench(
        options.name,
        "Cloister and its peers",
        "against the best peer that loses about as much or less: decode and prefill 1.3 times as fast, many at once 1.5 times, "
        "in less memory; 85, 75 and 65% of what the machine allows",
    )
    losses = Losses.read(options.output.expanduser() / "quality.json")
    verdicts = {}
    for shape in shapes:
        entrants = roster.entrants(shape)
        _print_limits(bench, ledger, shape, [roster.limits(shape, isa) for isa in roster.isas])
        _print_all(bench, ledger, shape, entrants, losses)
        verdicts[shape.name] = list(judge(ledger, shape, entrants, losses))
        _print_verdicts(bench, shape, verdicts[shape.name])
        _check_verdicts(bench, shape, verdicts[shape.name])
        _check_http(bench, ledger, shape, entrants)
        _check_first_token(bench, ledger, shape, verdicts[shape.name])
    bench.figures["runs"] = [asdict(run) for run in ledger.runs]
    bench.figures["notes"], bench.figures["failures"] = ledger.notes, ledger.failures
    for place, why in ledger.failures.items():
        console.print(f"No figures of {place}: {why}", style="red", highlight=False, markup=False)
    console.print("* others were at work beside every run of this figure: repeat it", style="dim")
    return bench.finish(options)


def _print_limits(bench: Bench, ledger: Ledger, shape: Shape, measured: Sequence[Entrant]) -> None:
    rows = []
    for entrant in measured:
        notes = ledger.notes.get(f"{shape.name}/{entrant.name}", {})
        for limit in LIMITS.values():
            if result := ledger.result(shape.name, entrant.name, limit.name):
                rows.append((entrant.isa, limit.title, limit.unit, str(result), notes.get(limit.name, {}).get("way", "")))
    headers = ("instruction set", "limit", "unit", "median (range)", "fastest way")
    bench.print_rows(f"{shape.name}: the machine", headers, rows)


def _print_all(bench: Bench, ledger: Ledger, shape: Shape, entrants: Sequence[Entrant], losses: Losses) -> None:
    measured = [figure for figure in FIGURES.values() if any(ledger.result(shape.name, e.name, figure.name) for e in entrants)]
    rows = []
    for entrant in sorted(entrants, key=lambda entrant: (entrant.isa, -entrant.bits)):
        results = [ledger.result(shape.name, entrant.name, figure.name) for figure in measured]
        if any(results):
            shown = (str(result) if result else "-" for result in results)
            rows.append((entrant.name, show_loss(losses.of(entrant)), *shown))
    headers = [f"{figure.title}, {figure.unit}" for figure in measured]
    bench.print_rows(f"{shape.name}: everybody, median (range)", ("engine", LOSS, *headers), rows)


def _print_verdicts(bench: Bench, shape: Shape, verdicts: Sequence[Verdict]) -> None:
    rows = [
        (
            f"{verdict.figure.title}, {verdict.figure.unit}",
            f"{verdict.number_format} {verdict.isa}",
            show_loss(verdict.loss),
            str(verdict.ours),
            f"{verdict.best[0].name}: {show(verdict.best[1])}" if verdict.best else "-",
            show_loss(verdict.best_loss),
            f"{verdict.ratio:.2f}x" if verdict.ratio else "-",
            show(verdict.limit) if verdict.limit else "-",
            f"{verdict.share:.0%}" if verdict.share else "-",
        )
        for verdict in verdicts
    ]
    headers = (
        "figure", "format", LOSS, "ours", "best peer of equal loss", "its loss", "times as good", "limit", "of the limit",
    )  # fmt: skip
    bench.print_rows(f"{shape.name}: against the best", headers, rows)


def _check_verdicts(bench: Bench, shape: Shape, verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        if verdict.figure.kind not in GOALS or not _is_judged(verdict, verdicts):
            continue
        peer_goal, share_goal = GOALS[verdict.figure.kind]
        what = f"{shape.name} {verdict.figure.title}, {verdict.number_format} {verdict.isa}"
        # At 16 bits a peer is at the wall already: the share says it all.
        if verdict.ratio is not None and not (verdict.figure.kind == "decode" and verdict.number_format == "bf16"):
            bench.check(f"{what}: over the best peer", verdict.ratio, low=peer_goal)
        if verdict.share is not None:
            bench.check(f"{what}: share of the limit", verdict.share, low=share_goal)


def _is_judged(verdict: Verdict, verdicts: Sequence[Verdict]) -> bool:
    """Prefill counts in the best format only."""
    if verdict.figure.kind != "prefill":
        return True
    rivals = (other for other in verdicts if (other.figure, other.isa) == (verdict.figure, verdict.isa))
    return all(other.ours.median <= verdict.ours.median for other in rivals)


def _check_http(bench: Bench, ledger: Ledger, shape: Shape, entrants: Sequence[Entrant]) -> None:
    rows = []
    for entrant in entrants:
        offline = ledger.result(shape.name, f"{OURS} {entrant.number_format} {entrant.isa}", "together16")
        http = ledger.result(shape.name, entrant.name, "http16")
        if http and offline:
            ratio = http.median / offline.median
            rows.append((entrant.name, str(http), str(offline), f"{ratio:.3f}"))
            if entrant.peer == HTTP:
                bench.check(f"{shape.name} 16 over HTTP, {entrant.number_format}: over offline", ratio, low=HTTP_GOAL)
    if rows:
        bench.print_rows(f"{shape.name}: over HTTP", ("server", "tok/s", "offline, tok/s", "ratio"), rows)


def _check_first_token(bench: Bench, ledger: Ledger, shape: Shape, verdicts: Sequence[Verdict]) -> None:
    embedded = ledger.result(shape.name, f"{OURS} embedded", "first_token")
    if embedded is not None:
        bench.check("embedded model, start to first token, s", embedded.median, high=FIRST_TOKEN_GOALS_S["embedded"])
    if shape.name in FIRST_TOKEN_GOALS_S:
        for verdict in verdicts:
            if verdict.figure.kind == "first_token":
                what = f"{shape.name} {verdict.number_format} {verdict.isa}, start to first token, s"
                bench.check(what, verdict.ours.median, high=FIRST_TOKEN_GOALS_S[shape.name])
