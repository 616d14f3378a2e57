"""Plots as PNG files, or as SVG text for a page, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cloister.bench.recorder import RequestRecord
from cloister.bench.report import Summary, list_spreads
from cloister.bench.roofline import RoofedOperator, Roofline, StepRoofline, describe_work

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd7a1f", "#2f855a", "#c53030", "#718096"
NUM_BINS = 32

STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.bbox": "tight",
}


@contextmanager
def draw(
    target: Path | BytesIO, title: str, rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.4, 3.6)
) -> Iterator[list[Axes]]:
    """Yields `rows * columns` axes, row by row, and writes them to a file as a PNG, or to a buffer as SVG."""
    with style.context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        yield [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]
        if isinstance(target, BytesIO):
            figure.savefig(target, format="svg")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target)


def plot_distribution(axes: Axes, values: Sequence[float]) -> None:
    """Draws the cumulative distribution of `values` (seconds), in milliseconds; logarithmic if they span a wide range."""
    milliseconds = np.sort(np.maximum(np.asarray(values), 1e-6)) * 1e3
    shares = np.arange(1, len(milliseconds) + 1) / len(milliseconds)
    axes.step(milliseconds, shares, color=BLUE, where="post")
    _scale_axis(axes)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of values at most x")


def _scale_axis(axes: Axes) -> None:
    """Makes the x axis logarithmic, with plain numbers, if the data spans more than a factor of 8."""
    low, high = axes.dataLim.intervalx
    if low > 0 and high / low > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1e4 else f"{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def plot_run(target: Path | BytesIO, title: str, records: Sequence[RequestRecord], summary: Summary) -> None:
    """Draws one run: distributions of TTFT, TBT and E2E with their percentiles, and the run over time."""
    good = [r for r in records if r.ok]
    panels = (
        ("TTFT", "Time to first token", [r.ttft_s for r in good if r.deliveries]),
        ("TBT", "Time between tokens", [gap for r in good for gap in r.gaps_s]),
        ("E2E", "Time to last token", [r.e2e_s for r in good]),
    )
    with draw(target, title, 2, 2) as axes:
        for panel, (name, words, values) in zip(axes, panels, strict=False):
            panel.set_title(f"{words} ({name})")
            panel.set_xlabel(f"{name}, ms")
            _plot_percentiles(panel, name, values, summary)
        plot_timeline(axes[3], records)


def plot_timeline(axes: Axes, records: Sequence[RequestRecord]) -> None:
    """Draws output tokens per second and requests in flight over the run."""
    end_s = max(r.end_s for r in records)
    edges = np.linspace(0, max(end_s, 1e-3), NUM_BINS + 1)
    times = [time_s for r in records for time_s, _ in r.deliveries]
    weights = [count for r in records for count in _spread_tokens(r)]
    tokens, _ = np.histogram(times, edges, weights=weights)
    axes.stairs(tokens / np.diff(edges), edges, fill=True, color=BLUE, alpha=0.35)
    axes.set_title("Over the run")
    axes.set_xlabel("time since the first request, s")
    axes.set_ylabel("output tokens per second", color=BLUE)
    in_flight = [sum(r.due_s <= t < r.end_s for r in records) for t in edges]
    other = axes.twinx()
    other.plot(edges, in_flight, color=ORANGE)
    other.set_ylabel("requests in flight", color=ORANGE)
    other.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)
    other.grid(False)


def _spread_tokens(record: RequestRecord) -> list[float]:
    """Tokens of each delivery; if only pieces of text were seen, the tokens are spread evenly over them."""
    seen = sum(count for _, count in record.deliveries)
    factor = record.num_output_tokens / seen if seen else 0.0
    return [count * factor for _, count in record.deliveries]


def _plot_percentiles(axes: Axes, name: str, values: Sequence[float], summary: Summary) -> None:
    spread = list_spreads(summary).get(name)
    if spread is None:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=GREY)
        return
    plot_distribution(axes, values)
    marks = ((50, spread.p50, GREEN), (90, spread.p90, ORANGE), (99, spread.p99, RED))
    for percent, value, colour in marks:
        label = f"P{percent}  {value * 1e3:,.1f} ms"
        axes.axvline(value * 1e3, color=colour, linewidth=1.2, linestyle="--", label=label)
    axes.legend(loc="best")


# The roofline plot: attainable operations per second over arithmetic intensity, with every operator.


_COLOURS = {"prefill": BLUE, "decode": ORANGE}


def plot_roofline(path: Path, roofline: Roofline) -> None:
    """Writes a PNG: the roofs of the number formats in use, log by log, and the operators of both steps."""
    with draw(path, f"{roofline.model} on {roofline.chip.name}", 1, 1, size=(8.6, 5.4)) as (axes,):
        placed = [_place(row, roofline) for step in roofline.steps for row in step.rows if row.operator.num_flops]
        low, high = min(x for x, _ in placed) / 20, max(*(x for x, _ in placed), _ridge(roofline)) * 3
        axes.set_xscale("log")
        axes.set_yscale("log")
        _draw_roofs(axes, roofline, low, high)
        for step in roofline.steps:
            _draw_step(axes, step, roofline)
        axes.set_xlabel("arithmetic intensity, FLOP per byte")
        axes.set_ylabel("FLOP per second at the roof")
        axes.legend(loc="lower right")


def _draw_roofs(axes: Axes, roofline: Roofline, low: float, high: float) -> None:
    chip = roofline.chip
    bits = {row.operator.bits for step in roofline.steps for row in step.rows if row.operator.unit == "matrix"}
    peaks = {chip.product_format(b): chip.product_peak(b) for b in sorted(bits)} | {"outside of products": chip.vector_peak}
    intensity = np.geomspace(low, high, 200)
    for (name, peak), line in zip(peaks.items(), ("-", "--", "-.", ":"), strict=False):
        axes.plot(intensity, np.minimum(peak, intensity * chip.read_bytes_per_s), line, color=GREY, linewidth=1.4)
        axes.text(high, peak * 1.08, f"{name}, {peak / 1e12:.3g} TFLOP/s", ha="right", fontsize=8, color=GREY)
    axes.axvline(_ridge(roofline), color=RED, linewidth=0.8, linestyle=":", label=f"ridge, {_ridge(roofline):.0f} FLOP/B")


def _draw_step(axes: Axes, step: StepRoofline, roofline: Roofline) -> None:
    """Nearby points share one label."""
    colour = _COLOURS[step.work.name]
    places: dict[tuple[int, int], list[str]] = {}
    points: dict[tuple[int, int], tuple[float, float]] = {}
    for row in step.rows:
        if not row.operator.num_flops:
            continue
        x, y = _place(row, roofline)
        spot = (round(6 * np.log10(x)), round(6 * np.log10(y)))
        places.setdefault(spot, []).append(row.operator.name)
        points.setdefault(spot, (x, y))
        axes.plot([x], [y], "o", color=colour, markersize=5)
    axes.plot([], [], "o", color=colour, label=describe_work(step.work))
    below = step.work.name == "prefill"
    for spot, names in places.items():
        label = ", ".join(dict.fromkeys(names))
        offset = (6, -9) if below else (-6, 5)
        align = "left" if below else "right"
        axes.annotate(label, points[spot], offset, textcoords="offset points", fontsize=7, color=colour, ha=align)


def _place(row: RoofedOperator, roofline: Roofline) -> tuple[float, float]:
    """Intensity, and the attainable operations per second."""
    operator = row.operator
    peak = roofline.chip.product_peak(operator.bits) if operator.unit == "matrix" else roofline.chip.vector_peak
    return operator.intensity, min(peak, operator.intensity * roofline.chip.read_bytes_per_s)


def _ridge(roofline: Roofline) -> float:
    return roofline.chip.ridge(max(roofline.numbers.weights_bits, roofline.numbers.activation_bits))
