"""The roofline as a picture: attainable operations per second over intensity, with every operator on its roof."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from cloister.bench.plots import BLUE, GREY, ORANGE, RED, draw
from cloister.bench.roofline import RoofedOperator, Roofline, StepRoofline
from cloister.bench.roofline_report import describe_work

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
    """Points of about the same place share one label."""
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
    """Intensity, and the operations per second that the roof leaves at it."""
    operator = row.operator
    peak = roofline.chip.product_peak(operator.bits) if operator.unit == "matrix" else roofline.chip.vector_peak
    return operator.intensity, min(peak, operator.intensity * roofline.chip.read_bytes_per_s)


def _ridge(roofline: Roofline) -> float:
    return roofline.chip.ridge(max(roofline.numbers.weights_bits, roofline.numbers.activation_bits))
