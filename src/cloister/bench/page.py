"""A measurement as one self-contained HTML file: figures, plots, the slowest requests, and the settings."""

from __future__ import annotations

import base64
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from io import BytesIO

from jinja2 import Environment, StrictUndefined

from cloister import __version__
from cloister.bench.measure import Measurement
from cloister.bench.plots import plot_run
from cloister.bench.recorder import RequestRecord
from cloister.bench.report import PERCENTILES, Summary, list_figures, list_spreads
from cloister.engine.machine import read_machine

NUM_SLOWEST = 10


def render_page(title: str, measurement: Measurement, settings: Mapping[str, object]) -> str:
    """Returns the page.

    Args:
        settings: the run's settings, by name.
    """
    summary = measurement.summary
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(resources.files("cloister.bench").joinpath("page.html.jinja").read_text("utf-8"))
    spreads = list_spreads(summary)
    return template.render(
        title=title,
        when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=_describe_machine(),
        version=__version__,
        tiles=_pick_tiles(summary),
        plot=_draw_plot(measurement),
        plot_words=f"Distributions of {', '.join(spreads)}, and output tokens per second over the run",
        latency_headers=("mean", *(f"P{percent}" for percent in PERCENTILES), "max"),
        latencies=[
            (name, [f"{1e3 * value:,.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)])
            for name, spread in spreads.items()
        ],
        figures=list_figures(summary),
        slowest=[_describe_request(record) for record in _pick_slowest(measurement.records)],
        settings=[(name, value) for name, value in settings.items() if value is not None],
    )


def _pick_tiles(summary: Summary) -> list[tuple[str, str]]:
    """The key figures: (value, label)."""
    tiles = [
        (f"{summary.output_tokens_per_s:,.1f}", "output tokens per second"),
        (f"{summary.total_tokens_per_s:,.0f}", "tokens per second, input and output"),
        (f"{summary.num_ok} of {summary.num_requests}", "requests answered"),
    ]
    named = (("TTFT", summary.ttft, "time to first token, P50"), ("TBT", summary.tbt, "time between tokens, P99"))
    for name, spread, words in named:
        if spread is not None:
            tiles.append((f"{1e3 * (spread.p50 if name == 'TTFT' else spread.p99):,.0f} ms", words))
    if summary.slo_share is not None:
        tiles.append((f"{summary.slo_share:.0%}", f"within the SLO ({summary.slo})"))
    return tiles


def _draw_plot(measurement: Measurement) -> str:
    drawn = BytesIO()
    plot_run(drawn, "", measurement.records, measurement.summary)
    return base64.b64encode(drawn.getvalue()).decode()


def _pick_slowest(records: list[RequestRecord]) -> list[RequestRecord]:
    """Failed requests first, then by the time to their last token."""
    return sorted(records, key=lambda record: (record.ok, -record.e2e_s))[:NUM_SLOWEST]


def _describe_request(record: RequestRecord) -> tuple[object, ...]:
    ttft = f"{1e3 * record.ttft_s:,.0f}" if record.deliveries else "-"
    return (
        record.number, f"{record.due_s:.2f}", record.num_input_tokens, record.num_cached_tokens, record.num_output_tokens,
        ttft, f"{1e3 * record.e2e_s:,.0f}", record.failure or "answered",
    )  # fmt: skip


def _describe_machine() -> str:
    machine = read_machine()
    return f"{platform.machine()}, {machine.num_cpus} CPUs, {machine.memory_bytes / 2**30:.0f} GiB"
