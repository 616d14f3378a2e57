"""What steps with an image cost on each back end: a decoder of Qwen2.5-VL-3B's widths, cut to few layers, with random weights.

A prompt of 512 positions, 400 of which are an image of 20 x 20, and tokens behind it. Only the decoder is timed: every back end
has the same tower. The same prompt as text shows what three positions and given rows cost beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.harness import Bench, make_parser, make_progress
from cloister.backends.base import GREEDY, LOGITS, Capability, ForwardBatch, Weights
from cloister.backends.spec import DecoderSpec
from cloister.executor.images import GridPositions
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.driving import Driver, RandomWeights, build, make_spec

NUM_TOKENS, FIRST, SIDE = 512, 60, 20
"""Positions of the prompt, where its image begins, and rows and columns of that."""
GRIDS = GridPositions(((FIRST, FIRST + SIDE**2, SIDE, SIDE**2 - SIDE),))
SECTIONS = (16, 24, 24)
FORMS = {"torch, bfloat16": ("torch", "none"), "native, bfloat16": ("native", "none"), "native, int8": ("native", "int8")}
FORMS |= {"native, int4": ("native", "int4")}


class ImageDriver(Driver):
    """Puts an image at its positions in every sequence whose name is not "text"."""

    def plan(self, parts: dict[object, Sequence[int]], logit_rows: Sequence[int] | None = None) -> ForwardBatch:  # type: ignore[override]
        batch = super().plan(parts, logit_rows=[sum(map(len, parts.values())) - 1])
        if "text" in parts:
            return batch
        inside = (batch.positions >= FIRST) & (batch.positions < FIRST + SIDE**2)
        places = np.flatnonzero(inside).astype(np.int32)
        rows = np.random.default_rng(4).standard_normal((len(places), 2048), dtype=np.float32)
        turned = replace(batch, rope_positions=GRIDS.turn(batch.positions))
        return replace(turned, embeddings=rows, embedding_rows=places) if len(places) else turned


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-layers", type=int, default=2, help="layers that the decoder is cut to")
    parser.add_argument("--num-rounds", type=int, default=5, help="prompts of each kind, in turn")
    parser.set_defaults(num_threads=1)
    options = parser.parse_args()
    clock = "processor time of one thread" if options.num_threads == 1 else f"wall time of {options.num_threads} threads"
    bench = Bench(
        "image_steps",
        f"Steps with an image, {options.num_layers} layers of Qwen2.5-VL-3B's widths, {clock}",
        "native steps take less than torch's; an image costs what as much text does",
    )
    rows = measure(widths_of_qwen(options.num_layers), options)
    bench.print_rows("Steps", ("back end, weights", "prompt, ms", "prompt as text, ms", "token, ms", "token as text, ms"), rows)
    for name, prompt, text, *_ in rows:
        bench.check(f"an image over text, {name}", prompt / text, high=1.1)
    return bench.finish(options)


def widths_of_qwen(num_layers: int) -> DecoderSpec:
    spec = make_spec(hidden=2048, intermediate=11008, heads=(16, 2), head_dim=128, num_layers=num_layers, vocab=4096)
    axes = tuple(axis for axis, size in enumerate(SECTIONS) for _ in range(size))
    attention = spec.layers[0].grouped_attention
    assert attention.rope is not None
    attention = replace(attention, rope=replace(attention.rope, axes=axes), qkv_bias=True)
    return replace(spec, layers=(replace(spec.layers[0], attention=attention),) * num_layers)


def measure(spec: DecoderSpec, options: argparse.Namespace) -> list[tuple[str, float, float, float, float]]:
    """Returns medians in ms, back end by back end: a prompt with an image, the same of text, a token behind each."""
    now = time.process_time if options.num_threads == 1 else time.perf_counter
    weights: Weights = RandomWeights(spec)
    tokens = np.random.default_rng(options.seed).integers(0, spec.vocab_size, NUM_TOKENS).tolist()
    rows = []
    with make_progress() as progress:
        for name, (backend, quant) in progress.track(FORMS.items(), description="back ends"):
            held = weights if quant == "none" else QuantizedWeights(weights, FORMATS.get(quant)(FormatOptions()))
            made = build(spec, held, backend=backend, dtype="bfloat16", num_threads=options.num_threads)
            driver = ImageDriver(made.program, 256, made.block_size)
            wants = GREEDY if Capability.GREEDY in driver.program.capabilities else LOGITS
            times: dict[tuple[str, bool], list[float]] = {}
            for _ in range(options.num_rounds + 1):
                for kind in ("image", "text"):
                    for part in (tokens, *([token] for token in tokens[:8])):
                        batch, started = driver.plan({kind: part}), now()
                        driver.program.step(batch, wants)
                        times.setdefault((kind, len(part) == 1), []).append(now() - started)
                    driver.free(kind)
            first = {key: len(found) // (options.num_rounds + 1) for key, found in times.items()}  # a warm-up
            median = {key: float(np.median(found[first[key] :])) * 1e3 for key, found in times.items()}
            prompts, behind = ([median[kind, is_token] for kind in ("image", "text")] for is_token in (False, True))
            rows.append((name, prompts[0], prompts[1], behind[0], behind[1]))
    return rows


if __name__ == "__main__":
    sys.exit(main())
