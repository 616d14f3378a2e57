"""`cloister quantize`: quantizes, calibrates and measures a model, and writes it to a directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloister.cli.console import make_progress, out, print_json, print_table

if TYPE_CHECKING:
    from cloister.backends.tensors import Tensor
    from cloister.models import LoadedModel
    from cloister.quant import KVDtype
    from cloister.quant.quality import IntArray, TextScore


def quantize(
    model: Annotated[str, typer.Argument(help="Embedded model's name, model directory, or hub name.")],
    directory: Annotated[Path, typer.Argument(help="Directory to write to; must be empty or not exist.", metavar="OUT")],
    format_name: Annotated[str, typer.Option("--format", help="Number format: int8, int4, qoq or nvfp4.")] = "int4",
    method: Annotated[str, typer.Option(help="Calibration method: rtn (no text), gptq, awq or smoothquant.")] = "gptq",
    group_size: Annotated[
        int | None, typer.Option(help="Inputs that share a scale: 32, 64 or 128; unset, the default.", show_default=False)
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="Format of activations: int8 or bfloat16; unset, int8.", show_default=False)
    ] = None,
    rotate: Annotated[
        bool, typer.Option(help="Rotate inputs that are rounded; without it other engines can read the result.")
    ] = True,
    text: Annotated[
        Path | None, typer.Option(help="Text to calibrate on, UTF-8; unset, the shipped one.", metavar="FILE")
    ] = None,
    num_tokens: Annotated[int, typer.Option("--tokens", help="Maximum number of its tokens to use.", min=512)] = 32768,
    num_measured: Annotated[
        int, typer.Option("--measure", help="Tokens of held-out text to measure perplexity on; 0 measures nothing.", min=0)
    ] = 16384,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a model, and measure what that costs in perplexity."""
    from cloister.launch.calibrating import cut_windows
    from cloister.models import load, locate
    from cloister.models.quantized.encoding import check_place, write_model
    from cloister.quant import FORMATS, FormatOptions, read_activations
    from cloister.quant.calibration import CALIBRATORS, calibrate
    from cloister.quant.passages import CALIBRATION, HELD_OUT, read_passages

    number_format = FORMATS.get(format_name)(FormatOptions(group_size, read_activations(activations), rotate))
    calibrator = CALIBRATORS.get(method)
    path = locate(model, progress=True)
    check_place(path, directory)
    source = load(path)
    windows = cut_windows(source, read_passages(text or CALIBRATION), num_tokens)
    held_out = cut_windows(source, read_passages(HELD_OUT), num_measured) if num_measured else None
    started = time.perf_counter()
    with make_progress() as progress:
        task = progress.add_task("Calibrating", total=len(source.weights.names()))
        tensors = calibrate(source.spec, source.weights, windows, number_format, calibrator)
        write_model(path, directory, _advancing(tensors, lambda: progress.advance(task)), method)
    report: dict[str, object] = {
        "model": model,
        "format": format_name,
        "method": method,
        "directory": str(directory),
        "size_before_bytes": _size(path),
        "size_bytes": _size(directory),
        "elapsed_s": round(time.perf_counter() - started, 1),
    }
    if held_out is not None:
        report.update(compare(source, load(directory), held_out, number_format.kv_dtype))
    print_json(report) if as_json else _print(report)


def compare(before: LoadedModel, after: LoadedModel, windows: IntArray, kv_dtype: KVDtype) -> dict[str, object]:
    """Returns the perplexity of both models and their agreement, as JSON values."""
    from cloister.quant.quality import measure

    with make_progress() as progress:
        task = progress.add_task("Measuring", total=3 * (len(before.spec.layers) + 1))

        def run(model: LoadedModel, kv: KVDtype) -> TextScore:
            return measure(model.spec, model.weights, windows, kv, lambda: progress.advance(task))

        plain, few = run(before, "bfloat16"), run(after, "bfloat16")
        outcomes = {"bfloat16": few, kv_dtype: few if kv_dtype == "bfloat16" else run(after, kv_dtype)}
    return {
        "measured_tokens": int(windows.size),
        "perplexity_before": round(plain.perplexity, 4),
        "after": [
            {
                "kv": name,
                "perplexity": round(outcome.perplexity, 4),
                "difference": round(outcome.perplexity - plain.perplexity, 4),
                "greedy_agreement": round(outcome.agreement(plain), 4),
            }
            for name, outcome in outcomes.items()
        ],
    }


def _advancing(tensors: Iterator[tuple[str, Tensor]], advance: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    for item in tensors:
        advance()
        yield item


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _print(report: dict[str, object]) -> None:
    sizes = [f"{int(str(report[name])) / 1e6:.1f} MB" for name in ("size_before_bytes", "size_bytes")]
    out.print(f"{report['directory']}: {sizes[0]} became {sizes[1]} in {report['elapsed_s']} s", highlight=False)
    rows = report.get("after")
    if isinstance(rows, list):
        before = [("before, KV in bfloat16", report["perplexity_before"], "", "")]
        after = [
            (f"after, KV in {row['kv']}", row["perplexity"], f"{row['difference']:+}", f"{row['greedy_agreement']:.1%}")
            for row in rows
        ]
        title = f"Held-out text, {report['measured_tokens']} tokens"
        print_table(title, ["", "perplexity", "difference", "same greedy token"], [*before, *after])
