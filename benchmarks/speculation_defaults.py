"""D9 on public weights and real text: what `--speculate auto` brings and costs over no drafts, by clock and by processor time.

    python -m benchmarks.speculation_defaults --models cloister-5m,smollm2,DIR --kernels avx2,amx --quant int8

Three kinds of prompts: `text`, passages of the documentation, continued at temperature 0.7 with a seed; `chat`, questions about
a passage that stands in the prompt; `edit`, a passage that is to be repeated with one word changed. Rounds take turns, and
every answer has to be the one without drafts.

Predicted, by counting. A model without heads has n-grams alone: `edit` gains where the model copies at all, `text` and `chat`
cost what looking for drafts costs, 10 to 50 us a step of 5 to 20 ms, so 0.97 holds but where a wrong draft is verified.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.harness import MODEL, Bench, console, make_parser
from benchmarks.models import MODELS, dequantize, find_model
from benchmarks.peers.engines import file_backend
from benchmarks.speculation_runs import AUTO, PLAIN, Arm, open_arms, share_weights
from benchmarks.speculation_workloads import Workload
from cloister.models import locate
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.text import ChatTemplate, Tokenizer

BATCHES: Final = (1, 4, 16)
NUM_PROMPTS: Final = 16
ANSWER_TOKENS: Final = 48
PASSAGE_CHARS: Final = 600
FLOOR: Final = 0.97


class Times(NamedTuple):
    """What the answers of one round took, seconds."""

    clock_s: float
    processor_s: float


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default=MODEL, help="models, with commas: names, directories, or smollm2")
    parser.add_argument("--kernels", default="best", help="instruction sets, with commas; best is the processor's own")
    parser.add_argument("--quant", default="int8", help="number format of matrices, made on load")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of each cell")
    options = parser.parse_args()
    bench = Bench("speculation_defaults", "D9 on public weights: drafts as they pay, over none", predict())
    share_weights()
    for model in options.models.split(","):
        stored = find_model(model) if model in MODELS else None
        path = locate(model) if stored is None else dequantize(stored, stored.parent / "float32")
        for kernels in options.kernels.split(","):
            measure(bench, options, path, kernels)
    return bench.finish(options)


def predict() -> str:
    return " ".join((__doc__ or "").partition("Predicted, by counting. ")[2].split())


def measure(bench: Bench, options: argparse.Namespace, path: Path, kernels: str) -> None:
    """Measures every kind of prompt at every batch, and prints a table."""
    settings: dict[str, object] = {"num_threads": options.num_threads}
    if kernels != "best":
        settings["backend"] = file_backend(kernels)
    settings = {name: value for name, value in settings.items() if value is not None}
    arms, missing = open_arms((PLAIN, AUTO), path, options.quant, settings)
    if missing:
        raise SystemExit(f"{path.name}: {missing}")
    rows = []
    for workload in list_workloads(path):
        for batch in BATCHES:
            clock, processor = compare(arms, workload, batch, options.rounds)
            rows.append((workload.name, batch, clock, processor))
            for what, ratio in (("clock", clock), ("processor time", processor)):
                bench.check(
                    f"{path.name}, {kernels}, {workload.name}, {batch} at once: {what} of auto over none", ratio, low=FLOOR
                )
    bench.print_rows(
        f"{path.name}, {kernels}, {options.quant}", ("prompts", "at once", "speed by clock", "by processor time"), rows
    )


def compare(arms: dict[str, Arm], workload: Workload, batch: int, num_rounds: int) -> tuple[float, float]:
    """Returns how much sooner answers are there with drafts than without, medians over rounds; the first round warms up."""
    numbers = range(max(batch, 4))
    ratios = []
    for turn in range(num_rounds + 1):
        found = {}
        for name in (PLAIN, AUTO) if turn % 2 else (AUTO, PLAIN):
            clock_s, processor_s = time.perf_counter(), time.process_time()
            run = arms[name].answer(workload, numbers, batch)
            found[name] = run.answers, Times(time.perf_counter() - clock_s, time.process_time() - processor_s)
        if found[PLAIN][0] != found[AUTO][0]:
            raise SystemExit(f"{workload.name}, {batch} at once: an answer differs from the one without drafts")
        if turn:
            ratios.append([plain / auto for plain, auto in zip(found[PLAIN][1], found[AUTO][1], strict=True)])
    clock, processor = np.median(ratios, axis=0)
    console.print(f"{workload.name}, {batch} at once: clock {clock:.2f}, processor time {processor:.2f}", highlight=False)
    return float(clock), float(processor)


def list_workloads(path: Path) -> Iterator[Workload]:
    """Yields the three kinds of prompts as a model's tokens."""
    tokenizer, template = Tokenizer(path), ChatTemplate.load(path)
    text = read_passages(HELD_OUT)
    passages = [text[start : start + PASSAGE_CHARS] for start in range(0, NUM_PROMPTS * PASSAGE_CHARS, PASSAGE_CHARS)]

    def encode(texts: Sequence[str], *, chat: bool) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(render(text) if chat else tokenizer.encode(text, True)) for text in texts)

    def render(text: str) -> list[int]:
        return tokenizer.encode(template.render([{"role": "user", "content": text}]))

    asked = [f"{passage}\n\nWhat is this about? Answer in two sentences." for passage in passages]
    changed = [f"Repeat this text, but write CLOISTER for its first word:\n\n{passage[:240]}" for passage in passages]
    yield Workload("text", encode(passages, chat=False), ANSWER_TOKENS, temperature=0.7, ignore_eos=True)
    yield Workload("chat", encode(asked, chat=True), ANSWER_TOKENS, ignore_eos=True)
    yield Workload("edit", encode(changed, chat=True), ANSWER_TOKENS, ignore_eos=True)


if __name__ == "__main__":
    sys.exit(main())
