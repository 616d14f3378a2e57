"""What formats, back ends and other engines lose on two public models: perplexity, log-probabilities, KL divergence.

Text, windows and truth are those of `benchmarks.perplexity`.

python -m benchmarks.quality                                  every row of both models on the best kernels
python -m benchmarks.quality --only 'int4*' --model gemma3    some rows again; the others stay as they were
python -m benchmarks.quality --kernels all --backend both     every instruction set, and the torch back end
python -m benchmarks.quality --peers DIR                      llama.cpp and OpenVINO too, as in benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import Bench, console, make_parser, make_progress
from benchmarks.models import CACHE, MODELS
from benchmarks.peers.formats import PeerFailed, list_llama, list_openvino
from benchmarks.perplexity import NUM_WINDOWS, WINDOW, Case, FloatArray, Row
from cloister.backends import BACKENDS
from cloister.backends.base import Weights
from cloister.backends.native import _native
from cloister.backends.tensors import dequantized
from cloister.launch.calibrating import calibrate_on_load
from cloister.quant import FORMATS, FormatOptions, quantize_on_read
from tests.driving import build

PUBLISHED: Final = {"smollm2": 19.136, "gemma3": 18.10}
"""Perplexity of the truth as it was found before this benchmark was written, to the digits given."""
HEADERS: Final = (
    "row", "bits per weight", "perplexity", "loss, %", "± %", "rms of log-probabilities", "KL, nats", "same greedy token, %",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """One way to serve the model.

    Attributes:
        quant: a name of `FORMATS`, or "none".
        kv: what the cache holds; None for the type of the activations.
        is_stored: serve the published file itself, not the weights that it stands for.
        is_rounded: to nearest, where `--quant` would calibrate.
    """

    label: str
    quant: str = "none"
    kv: str | None = None
    options: FormatOptions = field(default_factory=FormatOptions)
    dtype: str = "bfloat16"
    is_stored: bool = False
    is_rounded: bool = False


FORMS: Final = (
    Form("float32", dtype="float32"),
    Form("bfloat16"),
    Form("bfloat16, KV int8", kv="int8"),
    Form("bfloat16, KV int4", kv="int4"),
    Form("GGUF as stored", is_stored=True),
    Form("int8", "int8"),
    Form("int8, inputs in bfloat16", "int8", options=FormatOptions(activations="bfloat16")),
    *(Form(f"int4, groups of {size}", "int4", options=FormatOptions(size)) for size in (32, 128)),
    Form("int4, inputs in bfloat16", "int4", options=FormatOptions(activations="bfloat16")),
    Form("int4, rounded to nearest", "int4", is_rounded=True),
    Form("nvfp4", "nvfp4"),
    Form("nvfp4, rounded to nearest", "nvfp4", is_rounded=True),
    Form("qoq", "qoq"),
    Form("qoq, KV int4", "qoq", "int4"),
    Form("qoq, rounded to nearest", "qoq", is_rounded=True),
)


def main() -> int:
    options = read_options()
    bench = Bench(
        "quality",
        "What formats and engines lose on public models",
        "float32 is the truth to five digits; bfloat16 and int8 lose less than 1%, int4 a few per cent, QoQ more than int4 in "
        "groups of 32, and both a quarter or more where they are rounded to nearest; the published file loses as little as its "
        "own codes do in bfloat16",
    )
    bench.figures |= read_figures(options.output / "quality.json")
    try:
        for name in options.models:
            with console.status(f"{name}: opening, dequantising"):
                case = Case.open(name, options.folder)
            check_truth(bench, case)
            measure(bench, options, case)
        judge(bench)
    finally:  # what was measured is kept, whatever ended the rest
        status = bench.finish(options)
    return status


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both", help="which public model")
    parser.add_argument("--folder", type=Path, default=CACHE, help="where models are kept")
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="measure rows whose name holds this; * and ? as in a shell"
    )
    parser.add_argument(
        "--backend", choices=("native", "torch", "both"), default="native", help="ours; torch is several times slower"
    )
    parser.add_argument("--kernels", default="best", help="instruction sets of native, with commas: best, all, or names")
    parser.add_argument("--peers", type=Path, default=None, metavar="DIR", help="folder of other engines; unset, none of them")
    options = parser.parse_args()
    options.models = list(MODELS) if options.model == "both" else [options.model]
    options.output = options.output.expanduser()
    options.num_threads = options.num_threads or 1
    names = _native.kernel_names()
    chosen = {"best": names[:1], "all": names}.get(options.kernels, options.kernels.split(","))
    if unknown := set(chosen) - set(names):
        parser.error(f"this processor has no kernels {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    options.kernels = chosen
    return options


def read_figures(path: Path) -> dict[str, Any]:
    """Returns what was measured before, so that rows can be measured again one by one."""
    return dict(json.loads(path.read_text(encoding="utf-8"))["figures"]) if path.exists() else {}


def check_truth(bench: Bench, case: Case) -> None:
    """Compares what both readers make of the file, and the truth with what it was before."""
    true = case.truth[np.arange(NUM_WINDOWS)[:, None], np.arange(WINDOW - 1), case.windows[:, 1:]]
    perplexity = float(np.exp(-true.mean(dtype=np.float64)))
    bench.figures[f"truth, {case.name}"] = {"perplexity": perplexity, "tokens": true.size, "windows": NUM_WINDOWS}
    wanted = PUBLISHED[case.name]
    bench.check(f"{case.name}: the truth's perplexity away from {wanted:g}", abs(perplexity - wanted), high=0.005)
    apart = max(
        float(np.abs(as_floats(case.model.weights, name) - as_floats(case.stored.weights, name)).max())
        for name in case.model.weights.names()
    )
    bench.check(f"{case.name}: a weight, as our reader and transformers read it, apart", apart, high=0.0)


def as_floats(weights: Weights, name: str) -> FloatArray:
    return np.asarray(dequantized(weights.read(name)), np.float32)


def measure(bench: Bench, options: argparse.Namespace, case: Case) -> None:
    """Measures the rows that were asked for, and prints them among those that were measured before."""
    rows = list_rows(options, case)
    kept = {str(row["row"]): row for row in bench.figures.get(MODELS[case.name].title, [])}
    wanted = [row for row in rows if fnmatch(row.label, f"*{options.only}*")]
    with make_progress() as progress:
        task = progress.add_task(case.name, total=len(wanted) * NUM_WINDOWS)
        for row in wanted:
            progress.update(task, description=f"{case.name}, {row.label}")
            try:
                bits, logits = row.open()
                score = case.score(logits, partial(progress.advance, task))
            except PeerFailed as error:
                progress.console.print(f"{case.name}, {row.label}: {error}", style="red", highlight=False, markup=False)
                progress.advance(task, NUM_WINDOWS)
                continue
            kept[row.label] = dict(zip(HEADERS, (row.label, bits, *asdict(score).values()), strict=True))
            bench.figures[MODELS[case.name].title] = list(kept.values())
            progress.console.print(f"{case.name}, {row.label}: {score.loss:+.3f}%", style="dim", highlight=False)
    order = {row.label: number for number, row in enumerate(rows)}
    table = sorted(kept.values(), key=lambda found: order.get(str(found["row"]), len(order)))
    bench.print_rows(MODELS[case.name].title, HEADERS, [[found[header] for header in HEADERS] for found in table])


def list_rows(options: argparse.Namespace, case: Case) -> list[Row]:
    """Returns everything that can be measured here."""
    rows = []
    if options.backend in ("native", "both"):
        for kernels in options.kernels:
            prefix = f"native {kernels}: "
            rows += [Row(prefix + form.label, partial(open_own, case, form, options, kernels)) for form in FORMS]
    if options.backend in ("torch", "both"):
        rows += [Row(f"torch: {form.label}", partial(open_own, case, form, options)) for form in FORMS if form.kv is None]
    if options.peers is not None:
        folder = options.peers.expanduser().resolve()
        rows += list_llama(folder, case, options.num_threads) + list_openvino(folder, case, options.num_threads)
    return rows


def open_own(
    case: Case, form: Form, options: argparse.Namespace, kernels: str | None = None
) -> tuple[float, Iterator[FloatArray]]:
    """Builds a program; bits are of all that the back end keeps of the weights: scales, norms and padding included."""
    model = case.stored if form.is_stored else case.model
    weights: Weights = model.weights
    if form.quant != "none":
        number_format = FORMATS.get(form.quant)(form.options)
        if form.is_rounded or not number_format.wants_calibration:
            weights = quantize_on_read(model.spec, weights, number_format)
        else:
            weights = calibrate_on_load(model, number_format, cache=options.folder).weights
    backend = "torch" if kernels is None else "native"
    extra: dict[str, Any] = {} if kernels is None else {"kernels": kernels, "kv_dtype": form.kv}
    maker = BACKENDS.get(backend)(num_threads=options.num_threads, device="cpu", dtype=form.dtype, **extra)
    need = maker.need(model.spec, weights, block_size=16, max_batched_tokens=WINDOW)
    bits = 8 * need.weights_bytes / case.num_weights

    def run() -> Iterator[FloatArray]:
        settings = {"num_threads": options.num_threads, "dtype": form.dtype, "backend": backend, **extra}
        driver = build(model.spec, weights, num_blocks=64, **settings)
        for number, window in enumerate(case.windows):
            yield driver.run(number, window.tolist())
            driver.free(number)

    return bits, run()


def judge(bench: Bench) -> None:
    """Judges every row that has been measured, now or before."""
    for model in MODELS.values():
        for row in bench.figures.get(model.title, []):
            engine, _, form = str(row["row"]).partition(": ")
            if engine.startswith(("native", "torch")) and form == "float32":
                what = f"{model.name}, {row['row']}: log-probabilities apart from the truth, rms"
                bench.check(what, row["rms of log-probabilities"], high=1e-3)
            if engine.startswith("native") and form in ("bfloat16", "int8"):
                bench.check(f"{model.name}, {row['row']}: loss, %", row["loss, %"], high=1.0)


if __name__ == "__main__":
    sys.exit(main())
