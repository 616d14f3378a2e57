"""Q1: what every number format costs the embedded model on the native kernels: perplexity, greedy agreement, bits.

Held-out text goes through `Program.step` in windows of 512 tokens with all rows of logits, so what is judged are the
kernels, the packed weights and the KV cache that serve. Beside it `quant.quality`, which computes the same in numpy.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field

import numpy as np

from benchmarks.harness import MODEL, Bench, make_parser, make_progress
from cloister.backends.base import Weights
from cloister.backends.native import _native
from cloister.backends.native.model import pack_model
from cloister.backends.native.packing import PackedKind, PackedMatrix, Packer
from cloister.bench.plots import BLUE, GREY, ORANGE, draw
from cloister.launch.calibrating import cut_windows
from cloister.models import LoadedModel, load, locate
from cloister.quant import FORMATS, FormatOptions, HeldWeights, KVDtype, QuantizedWeights, quantize_on_read
from cloister.quant.calibration import CALIBRATORS, calibrate
from cloister.quant.passages import CALIBRATION, HELD_OUT, read_passages
from cloister.quant.quality import IntArray, TextScore, measure
from tests.driving import Driver, build

BOUND = 0.3
"""Perplexity that QoQ may lose against bfloat16 (QServe, Lin et al. 2024, loses 0.2 to 0.5 on models of 7B)."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to serve the model.

    Attributes:
        quant: a name of `FORMATS`, or "none".
        method: "rtn" as `--quant` does on load, or a calibrator as `cloister quantize --method` does.
        smooth: whether keys are smoothed, where the format would; only without calibration.
    """

    label: str
    quant: str = "none"
    kv_dtype: KVDtype = "bfloat16"
    options: FormatOptions = field(default_factory=FormatOptions)
    method: str = "rtn"
    smooth: bool = True


PLAIN = Form("bfloat16")
QOQ, QOQ_GPTQ = Form("qoq, KV int4", "qoq", "int4"), Form("qoq by gptq, KV int4", "qoq", "int4", method="gptq")
FORMS = (
    PLAIN,
    Form("bfloat16, KV int8", kv_dtype="int8"),
    Form("bfloat16, KV int4", kv_dtype="int4"),
    Form("int8", "int8"),
    Form("int8, KV int8", "int8", "int8"),
    *(Form(f"int4, groups of {size}", "int4", options=FormatOptions(size)) for size in (32, 64, 128)),
    Form("int4, inputs in bfloat16", "int4", options=FormatOptions(activations="bfloat16")),
    Form("int4 by gptq", "int4", method="gptq"),
    Form("qoq", "qoq"),
    Form("qoq, KV int8", "qoq", "int8"),
    QOQ,
    Form("qoq, KV int4, keys as they are", "qoq", "int4", smooth=False),
    Form("qoq by gptq", "qoq", method="gptq"),
    QOQ_GPTQ,
)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-tokens", type=int, default=32768, help="tokens of held-out text at most")
    options = parser.parse_args()
    model = load(locate(MODEL))
    windows = cut_windows(model, read_passages(HELD_OUT), options.num_tokens)
    bench = Bench(
        "formats",
        "Number formats of the embedded model, on the native kernels",
        "int8 loses nothing that matters, int4 more with wider groups; QoQ with 4-bit KV stays within 0.3 of bfloat16, as "
        "QServe says of models a thousand times the size; kernels and the reference in numpy agree",
    )
    true = run(build_driver(model, model.weights, "float32", "float32", options), windows)
    found: dict[Form, tuple[TextScore, TextScore]] = {}
    rows = []
    with make_progress() as progress:
        task = progress.add_task("formats", total=len(FORMS))
        for form in FORMS:
            weights = make_weights(model, form)
            outcome = run(build_driver(model, weights, "bfloat16", form.kv_dtype, options), windows)
            reference = measure(model.spec, weights, windows, form.kv_dtype)
            found[form] = outcome, reference
            lost = outcome.perplexity - found[PLAIN][0].perplexity
            bits = count_bits(model, weights)
            rows.append([form.label, *bits, outcome.perplexity, lost, spread(outcome, found[PLAIN][0]),
                         100 * outcome.agreement(true), reference.perplexity])  # fmt: skip
            progress.advance(task)
    bench.figures["text"] = {"tokens": int(windows.size), "window": int(windows.shape[1]), "float32": true.perplexity}
    headers = (
        "format", "bits per weight, layers", "whole model", "perplexity", "over bfloat16", "± over windows",
        "same greedy token as float32, %", "reference in numpy",
    )  # fmt: skip
    bench.print_rows("Formats", headers, rows)
    judge(bench, found)
    plot(bench, options, rows)
    return bench.finish(options)


def make_weights(model: LoadedModel, form: Form) -> Weights:
    """Returns the model's weights as a form wants them."""
    if form.quant == "none":
        return model.weights
    number_format = FORMATS.get(form.quant)(form.options)
    if form.method != "rtn":  # as `cloister quantize` does by default
        text = cut_windows(model, read_passages(CALIBRATION), 32768)
        return HeldWeights(dict(calibrate(model.spec, model.weights, text, number_format, CALIBRATORS.get(form.method))))
    if form.smooth:
        return quantize_on_read(model.spec, model.weights, number_format)
    return QuantizedWeights(model.weights, number_format)


def build_driver(model: LoadedModel, weights: Weights, dtype: str, kv_dtype: str, options: argparse.Namespace) -> Driver:
    threads = options.num_threads or 1
    return build(model.spec, weights, backend="native", num_blocks=64, dtype=dtype, kv_dtype=kv_dtype, num_threads=threads)


def run(driver: Driver, windows: IntArray) -> TextScore:
    """Runs windows [num_windows, length] through a program, each a sequence of its own, and judges every row but the last."""
    losses, choices = np.empty(windows[:, 1:].shape, np.float32), np.empty(windows[:, 1:].shape, np.int32)
    for number, window in enumerate(windows):
        logits = driver.run(number, window.tolist())[:-1]
        driver.free(number)
        peaks = logits.max(1)
        chosen = logits[np.arange(len(logits)), window[1:]]
        losses[number] = np.log(np.exp(logits - peaks[:, None]).sum(1)) + peaks - chosen
        choices[number] = logits.argmax(1)
    return TextScore(losses, choices)


def spread(outcome: TextScore, plain: TextScore) -> float:
    """Returns the standard error of the difference in perplexity: windows are drawn again, the same ones for both."""
    pairs = np.stack([outcome.losses.mean(1), plain.losses.mean(1)])
    drawn = np.random.default_rng(0).integers(0, pairs.shape[1], (1000, pairs.shape[1]))
    both = np.exp(pairs[:, drawn].mean(2))
    return float((both[0] - both[1]).std())


def count_bits(model: LoadedModel, weights: Weights) -> tuple[float, float]:
    """Returns bits per weight as the kernels keep them, scales and padding included: of the layers, and of the whole model."""
    packed = pack_model(model.spec, weights, Packer(_native.Pool(1), PackedKind.BF16))
    layers = [matrix for name, matrix in packed.matrices.items() if name.startswith("layers.")]
    return bits_per_weight(layers), bits_per_weight(list(packed.matrices.values()))


def bits_per_weight(packed: list[PackedMatrix]) -> float:
    return 8 * sum(matrix.num_bytes for matrix in packed) / sum(matrix.outputs * matrix.inputs for matrix in packed)


def judge(bench: Bench, found: dict[Form, tuple[TextScore, TextScore]]) -> None:
    plain = found[PLAIN][0].perplexity
    bench.check("perplexity that int8 loses against bfloat16", found[FORMS[3]][0].perplexity - plain, high=0.05)
    bench.check("perplexity that QoQ, written on load, loses", found[QOQ][0].perplexity - plain, high=BOUND)
    bench.check("perplexity that QoQ, written by gptq, loses", found[QOQ_GPTQ][0].perplexity - plain, high=BOUND)
    apart = [abs(ours.perplexity - theirs.perplexity) / spread(ours, theirs) for ours, theirs in found.values()]
    bench.check("kernels and the reference, furthest apart, in standard errors", max(apart), high=3.0)


def plot(bench: Bench, options: argparse.Namespace, rows: list[list[object]]) -> None:
    """Draws what each format loses."""
    labels, losses = [str(row[0]) for row in rows[1:]], [float(str(row[4])) for row in rows[1:]]
    errors = [float(str(row[5])) for row in rows[1:]]
    colours = [ORANGE if loss > BOUND else BLUE for loss in losses]
    with draw(bench.picture(options), bench.title, size=(7.2, 4.6)) as (axes,):
        axes.barh(labels, losses, color=colours, xerr=errors, error_kw={"ecolor": GREY, "capsize": 2})
        axes.axvline(BOUND, color=GREY, linestyle=":", linewidth=1.2)
        axes.set_xlabel("perplexity over bfloat16 (line: what QoQ may lose)")
        axes.invert_yaxis()


if __name__ == "__main__":
    sys.exit(main())
