"""`cloister bench`: throughput and latency of an engine, a server under the load of a trace, operators against the
roofline, and where a step's time goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.bench.settings import BURST, ArrivalsConfig, ObjectiveConfig, TargetConfig, WorkloadConfig
from cloister.cli import bench_io
from cloister.cli.console import (
    err,
    find_place,
    make_folder,
    make_progress,
    out,
    print_json,
    print_line,
    print_table,
    writing_to,
)
from cloister.cli.options import GivenSettings, with_settings
from cloister.cli.roofline import open_chip, read_model_spec
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError
from cloister.types.request import Request, SamplingParams
from cloister.types.text_files import read_text_file

if TYPE_CHECKING:
    from cloister.backends.spec import DecoderSpec
    from cloister.bench.kernels import KernelRate, KernelTable
    from cloister.bench.load import Target
    from cloister.bench.measure import Measurement
    from cloister.bench.profile import ProfiledStep, ProfileNode
    from cloister.bench.roofline_operators import Numbers
    from cloister.bench.workloads import Workload
    from cloister.engine import EngineCore

app = typer.Typer(
    help="Measure an engine or a server, with real traces, the operators of a step, or a disk.", no_args_is_help=True
)
app.command("io")(bench_io.io)

AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
Prompt = Annotated[int, typer.Option(help="Tokens of each random prompt.", min=1)]
Batch = Annotated[int, typer.Option(help="Sequences at once.", min=1)]
Output = Annotated[Path | None, typer.Option(help="Folder for the figures as HTML, JSON and PNG.", metavar="DIR")]

STALE_SHARE = 0.1
"""Share of cached prompt tokens, beyond the workload's own repetitions, above which a warning is printed."""
_WIDTHS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.0, "int4": 4.0, "kivi2": 3.0}
_TYPICAL_INPUTS = 4096  # number of inputs over which a scale per output is spread


@app.command()
@with_settings(EngineConfig)
def kernels(
    settings: GivenSettings,
    chip: Annotated[str, typer.Option(help="Chip for the comparison: one of `cloister roofline`, or `here`.")] = "here",
    prompt: Prompt = 512,
    context: Annotated[int, typer.Option(help="Keys of each sequence in the decode step.", min=1)] = 512,
    batch: Batch = 1,
    repeats: Annotated[int, typer.Option(help="Steps of each kind; the median is reported.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure each operator of one prefill and one decode step, and compare it with the roofline."""
    from cloister.bench.kernels import measure_kernels, num_blocks
    from cloister.bench.profile import group_blocks_of, program_of
    from cloister.bench.roofline_operators import Work

    config, engine = open_engine(settings)
    if config.device == "cuda" and chip == "here":
        raise ConfigError("`here` measures the processor; name the GPU with --chip", param="chip")
    works = (Work.prefill(prompt, batch), Work.decode(context, batch))
    _check_room(engine, max(prompt, context), max(num_blocks(work, config.block_size) for work in works))
    spec, program = read_model_spec(engine.model.path), program_of(engine)
    roof, numbers = open_chip(chip, config.num_threads), _numbers(config, spec)
    tables = [
        measure_kernels(
            program,
            spec,
            work,
            roof,
            numbers,
            block_size=config.block_size,
            num_repeats=repeats,
            group_blocks=group_blocks_of(engine),
        )
        for work in works
    ]
    if as_json:
        print_json({"model": engine.model.name, "chip": asdict(roof), "steps": [asdict(table) for table in tables]})
        return
    out.print(
        f"{engine.model.name} on {engine.model.backend}; roof: {roof.name}, {roof.source}", highlight=False, soft_wrap=True
    )
    for table in tables:
        _print_kernels(table)


@app.command()
@with_settings(EngineConfig)
def profile(
    settings: GivenSettings,
    prompt: Prompt = 128,
    new: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 32,
    batch: Batch = 4,
    trace: Annotated[
        Path | None, typer.Option(help="Write every span for Perfetto or chrome://tracing.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a step goes: Python and program, by operator and by thread.

    It starts an engine in this process and runs random prompts. A running server cannot be profiled: that would be privileged
    access to its users' activity. A trace contains names of operators, counts and times.
    """
    from cloister.bench.profile import profile_engine, to_trace
    from cloister.bench.workloads import make_tokens

    trace = find_place(trace) if trace is not None else None
    config, engine = open_engine(settings)
    _check_room(engine, prompt + new, -(-(prompt + new) // config.block_size))
    steps: list[ProfiledStep] = []
    for run in ("warm-up", "profile"):  # warm-up: the first run fills tables and caches
        prompts = [make_tokens([len(run), number], prompt, engine.model.vocab_size) for number in range(batch)]
        steps = profile_engine(engine, [_make_request(f"{run}-{n}", tokens, new) for n, tokens in enumerate(prompts)])
    by_kind = {kind: [step for step in steps if step.kind == kind] for kind in ("prefill", "decode")}
    by_kind = {kind: chosen for kind, chosen in by_kind.items() if chosen}
    if as_json:
        print_json({kind: _describe(chosen) for kind, chosen in by_kind.items()})
    else:
        for kind, chosen in by_kind.items():
            _print_profile(kind, chosen, engine.model.backend)
    if trace is not None:
        trace.write_text(json.dumps(to_trace(steps, engine.model.backend)) + "\n", encoding="utf-8")
        err.print(f"Written: {trace}; open it in ui.perfetto.dev or chrome://tracing", highlight=False)


def open_engine(settings: GivenSettings) -> tuple[EngineConfig, EngineCore]:
    """Loads an engine into this process.

    Raises:
        ConfigError: a setting has no meaning.
    """
    from cloister.launch import build_engine, resolve_settings

    resolved = resolve_settings(settings.of(EngineConfig), settings.config_file, listens=False)
    return resolved.engine.config, build_engine(resolved.engine.config)


def _make_request(name: str, tokens: list[int], num_new: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return Request(request_id=name, token_ids=tokens, sampling=sampling)


def _check_room(engine: EngineCore, num_positions: int, num_blocks: int) -> None:
    from cloister.bench.profile import group_blocks_of

    longest, held = engine.model.max_model_len, group_blocks_of(engine)[0]
    if num_positions > longest:
        raise ConfigError(f"the model holds {longest} positions, not {num_positions}; measure shorter prompts", param="prompt")
    if num_blocks > held:
        raise ConfigError(f"this takes {num_blocks} KV blocks and there are {held}; raise --kv-memory-mb", param="batch")


def _numbers(config: EngineConfig, spec: DecoderSpec) -> Numbers:
    import numpy as np

    from cloister.backends.tensors import stored_bits
    from cloister.bench.roofline_operators import Numbers
    from cloister.launch import NO_QUANT, number_format
    from cloister.quant import choose_kv_dtype

    bits = _WIDTHS[config.dtype or "bfloat16"]
    if config.quant == NO_QUANT:
        return Numbers(bits, bits, _WIDTHS[config.kv_dtype] if config.kv_dtype else bits, bits)
    chosen, matrix = number_format(config.quant), np.zeros((1, _TYPICAL_INPUTS), np.float32)
    return Numbers(
        weights_bits=stored_bits(chosen.quantize(matrix)),
        activation_bits=8.0,
        kv_bits=_WIDTHS[config.kv_dtype or choose_kv_dtype(chosen, spec)],
        head_bits=stored_bits(chosen.quantize_vocabulary(matrix)),
    )


def _print_kernels(table: KernelTable) -> None:
    from cloister.bench.roofline import describe_work

    headers = ("operator", "measured", "share", "FLOP/s", "B/s", "roof", "of the roof")
    whole_s = table.rates[-1].seconds
    print_table(describe_work(table.work), headers, [_kernel_row(rate, whole_s) for rate in table.rates])


def _kernel_row(rate: KernelRate, whole_s: float) -> tuple[str, ...]:
    from cloister.bench.roofline import scale, scale_time

    measured = (rate.name, scale_time(rate.seconds), f"{100 * rate.seconds / whole_s:.1f}%")
    if rate.roof_s is None or not rate.seconds:
        return (*measured, "-", "-", "-", "-")
    rates = (scale(rate.num_flops / rate.seconds), scale(rate.num_bytes / rate.seconds))
    return (*measured, *rates, scale_time(rate.roof_s), f"{100 * rate.roof_s / rate.seconds:.0f}%")


def _print_profile(kind: str, steps: Sequence[ProfiledStep], backend: str) -> None:
    from cloister.bench.profile import list_parts, list_threads

    parts = list_parts(steps)
    whole_s = parts[0].seconds
    headers = ("part", "where", "calls a step", "ms a step", "own ms", "own share")
    print_table(
        f"{len(steps)} {kind} steps, {1e3 * whole_s / len(steps):.2f} ms each",
        headers,
        [_part_row(part, len(steps), whole_s, backend) for part in parts],
    )
    python_s = sum(part.own_s for part in parts if not part.in_program)
    out.print(f"Python {100 * python_s / whole_s:.1f}%, {backend} {100 * (1 - python_s / whole_s):.1f}%", highlight=False)
    table = list_threads(steps)
    threads = sorted({thread for row in table.values() for thread in row})
    rows = [(name, *(f"{1e3 * row.get(thread, 0.0) / len(steps):.3f}" for thread in threads)) for name, row in table.items()]
    print_table("ms a step, by thread", ("operator", *(f"thread {thread}" for thread in threads)), rows)


def _part_row(part: ProfileNode, num_steps: int, whole_s: float, backend: str) -> tuple[str, ...]:
    name = "  " * (len(part.path) - 1) + part.path[-1]
    times = (f"{1e3 * part.seconds / num_steps:.3f}", f"{1e3 * part.own_s / num_steps:.3f}")
    where = backend if part.in_program else "Python"
    return (name, where, f"{part.num_calls / num_steps:g}", *times, f"{100 * part.own_s / whole_s:.1f}%")


def _describe(steps: Sequence[ProfiledStep]) -> dict[str, object]:
    from cloister.bench.profile import list_parts, list_threads

    threads = {name: {str(thread): seconds for thread, seconds in row.items()} for name, row in list_threads(steps).items()}
    return {"num_steps": len(steps), "parts": [asdict(part) for part in list_parts(steps)], "threads": threads}


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
    """One request after another on an engine in this process: time to first token, and between tokens."""
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
    """A server under load, as its clients see it: requests are sent at their arrival times, however slow the server is."""
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
    _warn_of_earlier_runs(measurement, workload, work.seed)
    _finish("serve", measurement, workload, shown, output, as_json)


def _warn_of_earlier_runs(measurement: Measurement, workload: Workload, seed: int) -> None:
    """Warns if the server found more in its cache than the workload itself repeats."""
    cached = measurement.summary.num_cached_tokens / max(1, measurement.summary.num_input_tokens)
    repeated = workload.count_repeated()
    if cached > repeated + STALE_SHARE:
        print_line(
            f"warning: {cached:.0%} of the prompt tokens came from the server's cache, but the workload itself repeats only "
            f"{repeated:.0%}: the server knew them from before, as from an earlier run with --seed {seed}. These figures are "
            "better than those of a first run: give each run another --seed, or start the server again before each",
            "bold yellow",
            console=err,
        )


def _prepare(settings: GivenSettings) -> tuple[EngineCore, Workload]:
    """Loads the engine and creates a workload of token ids that it can hold."""
    from cloister.bench.workloads import load_workload

    _, engine = open_engine(settings)
    model = engine.model
    work = settings.resolve(WorkloadConfig)
    workload = load_workload(work, BURST, max_model_len=model.max_model_len, vocab_size=model.vocab_size)
    return engine, _tokenize(workload, Path(model.path))


def _tokenize(workload: Workload, model_path: Path) -> Workload:
    """Tokenizes text prompts of a trace."""
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
    """Prints the figures and writes them to the requested folder; exits with 1 if no request was answered."""
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
    with writing_to(folder):
        (folder / f"{verb}.json").write_text(json.dumps(measurement.to_json(), indent=1) + "\n")
        (folder / f"{verb}.html").write_text(render_page(title, measurement, settings), encoding="utf-8")
        plot_run(folder / f"{verb}.png", title, measurement.records, measurement.summary)
    err.print(f"Written: {folder / verb}.html, .json and .png", highlight=False)
