"""`cloister bench`: throughput and latency of an engine, a server under the load of a trace, and single steps (`profiling`)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.bench.settings import BURST, ArrivalsConfig, ObjectiveConfig, TargetConfig, WorkloadConfig
from cloister.cli import profiling
from cloister.cli.console import err, make_folder, make_progress, out, print_json, print_table
from cloister.cli.options import GivenSettings, with_settings
from cloister.cli.profiling import AsJson, open_engine
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError
from cloister.types.text_files import read_text_file

if TYPE_CHECKING:
    from cloister.bench.load import Target
    from cloister.bench.measure import Measurement
    from cloister.bench.workloads import Workload
    from cloister.engine import EngineCore

app = typer.Typer(help="Measure an engine or a server, with real traces, or the operators of a step.", no_args_is_help=True)
app.command()(profiling.kernels)
app.command()(profiling.profile)

Output = Annotated[Path | None, typer.Option(help="Folder for the figures as HTML, JSON and PNG.", metavar="DIR")]


@app.command()
@with_settings(WorkloadConfig, EngineConfig)
def throughput(settings: GivenSettings, output: Output = None, as_json: AsJson = False) -> None:
    """All requests at once on an engine in this process: tokens per second."""
    from cloister.bench.measure import measure_engine

    output = make_folder(output) if output is not None else None
    engine, workload = _prepare(settings)
    with make_progress() as progress:
        task = progress.add_task("requests", total=len(workload.items))
        num_warmup = settings.resolve(WorkloadConfig).num_warmup
        measurement = measure_engine(engine, workload, num_warmup=num_warmup, on_end=lambda: progress.advance(task))
    _finish("throughput", measurement, workload, _list_settings(settings, WorkloadConfig, EngineConfig), output, as_json)


@app.command()
@with_settings(WorkloadConfig, EngineConfig)
def latency(settings: GivenSettings, output: Output = None, as_json: AsJson = False) -> None:
    """One request after the other on an engine in this process: time to first token, and between tokens."""
    from cloister.bench.measure import measure_one_by_one

    output = make_folder(output) if output is not None else None
    engine, workload = _prepare(settings)
    with make_progress() as progress:
        task = progress.add_task("requests", total=len(workload.items))
        num_warmup = settings.resolve(WorkloadConfig).num_warmup
        measurement = measure_one_by_one(engine, workload, num_warmup=num_warmup, on_end=lambda: progress.advance(task))
    _finish("latency", measurement, workload, _list_settings(settings, WorkloadConfig, EngineConfig), output, as_json)


@app.command()
@with_settings(TargetConfig, WorkloadConfig, ArrivalsConfig, ObjectiveConfig, config_file=False, model="api_model")
def serve(settings: GivenSettings, output: Output = None, as_json: AsJson = False) -> None:
    """A server under load, as its clients see it: requests leave at their times, whatever the server does."""
    from cloister.bench.measure import Objectives, measure_server
    from cloister.bench.workloads import load_workload

    output = make_folder(output) if output is not None else None
    work, limits = settings.resolve(WorkloadConfig), settings.resolve(ObjectiveConfig)
    workload = load_workload(work, settings.resolve(ArrivalsConfig))
    with make_progress() as progress:
        task = progress.add_task("requests", total=len(workload.items))
        run = measure_server(
            _find_target(settings.resolve(TargetConfig)),
            workload,
            objectives=Objectives.of_milliseconds(limits.slo_ttft_ms, limits.slo_tbt_ms),
            num_warmup=work.num_warmup,
            on_progress=lambda _: progress.advance(task),
        )
        measurement = asyncio.run(run)
    shown = _list_settings(settings, TargetConfig, WorkloadConfig, ArrivalsConfig, ObjectiveConfig)
    _finish("serve", measurement, workload, shown, output, as_json)


def _prepare(settings: GivenSettings) -> tuple[EngineCore, Workload]:
    """Loads the engine and makes a workload of token ids that it can hold."""
    from cloister.bench.workloads import load_workload

    _, engine = open_engine(settings)
    model = engine.model
    work = settings.resolve(WorkloadConfig)
    workload = load_workload(work, BURST, max_model_len=model.max_model_len, vocab_size=model.vocab_size)
    return engine, _tokenize(workload, Path(model.path))


def _tokenize(workload: Workload, model_path: Path) -> Workload:
    """Turns prompts that the trace has as text into token ids."""
    if not any(isinstance(item.prompt, str) for item in workload.items):
        return workload
    from cloister.text import Tokenizer

    tokenizer = Tokenizer(model_path)
    items = []
    for item in workload.items:
        ids = tokenizer.encode(item.prompt, True) if isinstance(item.prompt, str) else item.prompt
        items.append(replace(item, prompt=ids, num_input_tokens=len(ids)))
    return replace(workload, items=tuple(items))


def _find_target(config: TargetConfig) -> Target:
    from cloister.bench.load import Target, find_model

    url = config.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError("url must be an address such as http://127.0.0.1:8000", param="url")
    key_file = config.api_key_file
    api_key = read_text_file(Path(key_file), param="api_key_file").strip() if key_file is not None else None
    model = config.api_model or asyncio.run(find_model(url, api_key))
    return Target(url, model, api_key, config.timeout_s)


def _list_settings(settings: GivenSettings, *classes: type[Any]) -> dict[str, object]:
    """Returns every setting of a run by name, defaults included."""
    return {name: value for cls in classes for name, value in asdict(settings.resolve(cls)).items()}


def _finish(
    verb: str, measurement: Measurement, workload: Workload, settings: dict[str, object], output: Path | None, as_json: bool
) -> None:
    """Prints the figures and writes them where they were wanted; exits with 1 if no request was answered."""
    summary = measurement.summary
    if as_json:
        print_json({"verb": verb, "skipped": workload.num_skipped, **measurement.to_json()})
    else:
        _print_figures(verb, measurement, workload)
    if output is not None:
        _write_figures(verb, measurement, settings, output)
    if not summary.num_ok:
        raise typer.Exit(1)


def _print_figures(verb: str, measurement: Measurement, workload: Workload) -> None:
    from cloister.bench.report import PERCENTILES, list_figures, list_spreads

    summary = measurement.summary
    print_table(f"{verb}: {summary.name}", ("figure", "value"), list_figures(summary))
    headers = ("latency, ms", "mean", *(f"P{p}" for p in PERCENTILES), "max")
    spreads = list_spreads(summary).items()
    rows = [(name, *(f"{1e3 * v:.1f}" for v in (s.mean, s.p50, s.p90, s.p99, s.max))) for name, s in spreads]
    print_table("", headers, rows)
    if workload.num_skipped:
        out.print(f"{workload.num_skipped} requests of the trace are too long and were left out", style="yellow")


def _write_figures(verb: str, measurement: Measurement, settings: dict[str, object], folder: Path) -> None:
    from cloister.bench.page import render_page
    from cloister.bench.plots import plot_run

    title = f"cloister bench {verb}: {measurement.summary.name}"
    (folder / f"{verb}.json").write_text(json.dumps(measurement.to_json(), indent=1) + "\n")
    (folder / f"{verb}.html").write_text(render_page(title, measurement, settings), encoding="utf-8")
    plot_run(folder / f"{verb}.png", title, measurement.records, measurement.summary)
    err.print(f"Written: {folder / verb}.html, .json and .png", highlight=False)
