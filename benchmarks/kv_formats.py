"""M13: what each format of KV takes, costs and loses, beside KV in bfloat16.

The text is that of `benchmarks.perplexity`, for the embedded model the held-out passages of `cloister quantize`, cut into
windows of 1,000 tokens. Weights and activations are bfloat16 everywhere, so that nothing but KV differs. Decode steps of all
formats take turns, and the quickest of each counts, as machines are shared. "int4, smoothed" has the keys of SmoothAttention
(`quant/smooth_attention.py`), judged by the weights alone.

python -m benchmarks.kv_formats                      both public models and the embedded one
python -m benchmarks.kv_formats --model cloister-5m  one of them
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.harness import Bench, console, make_parser, make_progress
from benchmarks.models import open_checkpoint
from benchmarks.perplexity import FloatArray, IntArray, log_softmax, read_text, summarise
from cloister.backends import BACKENDS
from cloister.backends.base import GREEDY, Weights
from cloister.models import LoadedModel, load
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.quant.smooth_attention import SmoothedKeys
from cloister.text import Tokenizer
from tests.driving import Driver, build

NAMES: Final = ("cloister-5m", "smollm2", "gemma3")
NUM_WINDOWS, WINDOW, CHUNK, BLOCK_SIZE = 3, 1000, 500, 32
HEADERS: Final = (
    "KV", "bytes per token", "of bfloat16, %", "perplexity", "loss, %", "± %", "KL, nats", "same greedy token, %",
    "decode, ms a step", "of bfloat16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """One format of KV."""

    label: str
    kv_dtype: str
    smooths: bool = False


FORMS: Final = (
    Form("bfloat16", "bfloat16"),
    Form("int8", "int8"),
    Form("int4", "int4"),
    Form("int4, smoothed", "int4", smooths=True),
    Form("kivi2", "kivi2"),
)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=NAMES, help="one model only")
    parser.add_argument("--kernels", help="instruction set; unset, the processor's own")
    parser.add_argument("--num-steps", type=int, default=40, help="decode steps of each format")
    parser.set_defaults(num_threads=1)
    options = parser.parse_args()
    bench = Bench(
        "kv_formats",
        f"KV formats, kernels {options.kernels or 'best'}, {options.num_threads} thread(s)",
        "int8 and int4 lose less than 1% of perplexity on public models, and kivi2 takes a fifth of the memory",
    )
    for name in NAMES if options.model is None else (options.model,):
        measure(bench, options, name)
    for title, rows in bench.figures.items():
        judge(bench, title, rows)
    return bench.finish(options)


def measure(bench: Bench, options: argparse.Namespace, name: str) -> None:
    """Measures every format on one model."""
    path = open_checkpoint(name)
    text = read_passages(HELD_OUT) if name == NAMES[0] else read_text()
    model, windows = load(path), cut_windows(Tokenizer(path), text)
    truth: list[FloatArray] = []
    rows: list[list[Any]] = []
    drivers = {}
    for form in FORMS:
        maker = BACKENDS.get("native")(
            num_threads=options.num_threads, device="cpu", dtype="bfloat16", kv_dtype=form.kv_dtype,
            **({"kernels": options.kernels} if options.kernels else {}),
        )  # fmt: skip
        drivers[form] = open_driver(options, model, form)
        found = [run(drivers[form], number, window) for number, window in enumerate(windows)]
        truth = truth or found
        need = maker.need(model.spec, model.weights, block_size=BLOCK_SIZE, max_batched_tokens=CHUNK)
        size = need.kv_block_bytes / BLOCK_SIZE
        rows.append([form.label, size, 100 * size / (rows[0][1] if rows else size), *score(windows, found, truth)])
        console.print(f"{name}: {form.label}", style="dim", highlight=False)
    steps_ms = time_steps(options, drivers, windows)
    for row, form in zip(rows, FORMS, strict=True):
        row += [steps_ms[form], steps_ms[form] / steps_ms[FORMS[0]]]
    bench.figures[name] = [dict(zip(HEADERS, row, strict=True)) for row in rows]
    bench.print_rows(name, HEADERS, rows)


def cut_windows(tokenizer: Tokenizer, text: str) -> IntArray:
    """Returns [NUM_WINDOWS, WINDOW]; each begins with the BOS token if the model wants one."""
    plain, framed = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=True)
    front = framed[: len(framed) - len(plain)]
    starts = range(0, NUM_WINDOWS * WINDOW, WINDOW)
    return np.array([[*front, *plain[start : start + WINDOW - len(front)]] for start in starts], np.int32)


def open_driver(options: argparse.Namespace, model: LoadedModel, form: Form) -> Driver:
    weights: Weights = SmoothedKeys(model.spec, model.weights) if form.smooths else model.weights
    settings = {"kernels": options.kernels} if options.kernels else {}
    return build(
        model.spec, weights, backend="native", dtype="bfloat16", kv_dtype=form.kv_dtype, block_size=BLOCK_SIZE,
        num_blocks=NUM_WINDOWS * (WINDOW // BLOCK_SIZE + 4), num_threads=options.num_threads, **settings,
    )  # fmt: skip


def run(driver: Driver, number: int, window: IntArray) -> FloatArray:
    """Returns log-probabilities [WINDOW - 1, vocab] in half precision: three windows of a wide vocabulary are large."""
    return log_softmax(driver.run(number, window.tolist(), CHUNK)[:-1]).astype(np.float16)


def score(windows: IntArray, found: Sequence[FloatArray], truth: Sequence[FloatArray]) -> Iterator[float]:
    """Yields the columns from perplexity to the same greedy token."""
    own, true, divergences, num_same = [], [], [], 0
    for window, rows, others in zip(windows, found, truth, strict=True):
        places = np.arange(len(rows)), window[1:]
        own.append(rows[places].astype(np.float32))
        true.append(others[places].astype(np.float32))
        for start in range(0, len(rows), CHUNK // 10):
            part = slice(start, start + CHUNK // 10)
            ours, theirs = rows[part].astype(np.float32), others[part].astype(np.float32)
            divergences.append((np.exp(theirs) * (theirs - ours)).sum(1, dtype=np.float64))
            num_same += int((ours.argmax(1) == theirs.argmax(1)).sum())
    result = summarise(np.concatenate(own), np.concatenate(true), np.concatenate(divergences), num_same)
    yield from (result.perplexity, result.loss, result.error, result.divergence, result.agreement)


def time_steps(options: argparse.Namespace, drivers: dict[Form, Driver], windows: IntArray) -> dict[Form, float]:
    """Returns the least ms of a step in which one sequence for each window decodes behind about 1,000 tokens."""
    times: dict[Form, list[float]] = {form: [] for form in drivers}
    with make_progress() as progress:
        for _ in progress.track(range(options.num_steps), description="decode"):
            for form, driver in drivers.items():
                batch = driver.plan({number: [1] for number in range(len(windows))})
                start = time.perf_counter()
                driver.program.step(batch, GREEDY)
                times[form].append(1e3 * (time.perf_counter() - start))
    return {form: min(each) for form, each in times.items()}


def judge(bench: Bench, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Judges what was measured, now or before."""
    for row in rows:
        if row["KV"] == "kivi2":
            bench.check(f"{title}: bytes of kivi2, % of bfloat16", row["of bfloat16, %"], high=25)
        elif title != NAMES[0]:
            bench.check(f"{title}: loss of {row['KV']}, %", row["loss, %"], high=1)


if __name__ == "__main__":
    sys.exit(main())
