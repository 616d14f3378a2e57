"""What drafting brings: drafters over none, on several kinds of text, alone and with 4 and 16 sequences at once.

    python -m benchmarks.speculation --models smollm2 --kernels avx2,amx         # public weights, `auto` alone
    python -m benchmarks.speculation --models DIR --draft-model DRAFT_DIR        # the same with a small model that drafts
    python -m benchmarks.speculation --inflated DIR --drafters all --rounds 10   # a 1B shape, every drafter: hours, 2 GB in DIR

In each round every engine answers the same prompts, in an order that turns; a pair is a drafter's run and that of `none` in the
same round, and every settled answer has to be that of `none`. Time per token is that after the step in which the last answer of
a batch began, to the end of its last answer; "while all ran" ends before the step in which the first answer ended, which is how
a server with a queue goes on. Intervals are of the mean logarithm of the pairs' ratios (t, 95%).

The inflated model is cloister-5m in the shape of Llama 3.2 1B (`benchmarks.inflated`): drafts are accepted as they are for the
model, and a step costs what a billion weights cost.

Predicted, by counting. A step of one row reads the weights; up to about 16 rows verify nearly free. On the inflated pair a
draft model that is right in 56% of cases brings (1 - 0.56^5) / 0.44 = 2.1 tokens a step from a chain of 4. Where nothing is
foreseen, drafts cost what looking for them costs, so `auto` keeps 0.97.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, console, make_parser, make_progress
from benchmarks.inflated import open_inflated
from benchmarks.models import open_checkpoint
from benchmarks.peers.engines import file_backend
from benchmarks.speculation_runs import AUTO, DRAFTERS, PLAIN, Arm, Run, interval, open_arms, share_weights
from benchmarks.speculation_workloads import Prompts, Workload
from cloister.models import embedded_names

FLOOR: Final = 0.97


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--models", default="", help="models, with commas: names, directories, or smollm2")
    parser.add_argument("--inflated", type=Path, help="where the inflated model is, or shall be written (2 GB)")
    parser.add_argument("--drafters", default=AUTO, help="with commas; all: every drafter, and auto")
    parser.add_argument("--draft-model", help="small model that drafts; unset, what lies beside the model")
    parser.add_argument("--draft-tokens", type=int, help="drafts of a step; unset, as many as pay")
    parser.add_argument("--kernels", default="best", help="instruction sets, with commas; best is the processor's own")
    parser.add_argument("--quant", default="int8", help="number format of matrices, made on load")
    parser.add_argument("--texts", default="", help="kinds of text, with semicolons; unset, all")
    parser.add_argument("--batches", default="1,4,16", help="sequences at once")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of each cell")
    parser.add_argument("--name", default="speculation", help="of the file that it leaves")
    options = parser.parse_args()
    if not options.models and options.inflated is None:
        parser.error("name --models, or --inflated DIR")
    bench = Bench(options.name, "What drafts bring, over none", predict())
    share_weights()
    for name in filter(None, options.models.split(",")):
        path = open_checkpoint(name)
        prompts = Prompts(path)
        measure(bench, options, path, prompts.all() if name in embedded_names() else prompts.public())
    if options.inflated is not None:
        path = open_inflated(options.inflated)
        measure(bench, options, path, Prompts(path).all())
    return bench.finish(options)


def predict() -> str:
    return " ".join((__doc__ or "").partition("Predicted, by counting. ")[2].split())


def measure(bench: Bench, options: argparse.Namespace, path: Path, workloads: Mapping[str, Workload]) -> None:
    """Measures every kind of text at every batch on each instruction set, and prints a table for each."""
    drafters = (*DRAFTERS, AUTO) if options.drafters == "all" else options.drafters.split(",")
    texts = options.texts.split(";") if options.texts else list(workloads)
    for kernels in options.kernels.split(","):
        settings = {name: getattr(options, name) for name in ("num_threads", "draft_tokens", "draft_model")}
        settings["backend"] = None if kernels == "best" else file_backend(kernels)
        known = {name: value for name, value in settings.items() if value is not None}
        arms, missing = open_arms((PLAIN, *drafters), path, options.quant, known)
        for name, why in missing.items():
            console.print(f"[yellow]{name} is left out:[/] {why}", highlight=False)
        rows: list[tuple[object, ...]] = []
        for text in texts:
            for batch in map(int, options.batches.split(",")):
                pairs = measure_pairs(arms, workloads[text], batch, options.rounds)
                for name in list(arms)[1:]:
                    columns = score(name, pairs)
                    rows.append((text, batch, name, *columns))
                    if name == AUTO:
                        what = f"{path.name}, {kernels}, {text}, {batch} at once"
                        bench.check(f"{what}: auto over none", columns[0], low=FLOOR)
        headers = ("text", "at once", "drafter", "over none", "95%", "while all ran", "by processor time", "tokens a step")
        bench.print_rows(f"{path.name}, {kernels}, {options.quant}", headers, rows)


Pairs = Sequence[Mapping[str, Run]]
"""The run of each drafter, round by round."""


def measure_pairs(arms: Mapping[str, Arm], workload: Workload, batch: int, rounds: int) -> Pairs:
    """Answers prompts with every engine in turn, round after round; the first round warms up and does not count."""
    size, order, found = max(batch, 2), list(arms), []
    with make_progress() as progress:
        for turn in progress.track(range(rounds + 1), description=f"{workload.name}, {batch} at once"):
            numbers = [(turn * size + place) % len(workload.prompts) for place in range(size)]
            runs = {name: arms[name].answer(workload, numbers, batch) for name in order}
            order = order[1:] + order[:1]
            if workload.is_settled and any(run.answers != runs[PLAIN].answers for run in runs.values()):
                raise SystemExit(f"{workload.name}, {batch} at once: an answer differs from the one without drafts")
            found.append(runs)
    return found[1:]


def score(name: str, pairs: Pairs) -> tuple[float, str, float, float, float]:
    """Returns the ratio over none by the clock, its interval, the one while all ran (0: never), the one by processor time,
    and tokens a step."""
    runs, plain = [pair[name] for pair in pairs], [pair[PLAIN] for pair in pairs]
    both = list(zip(runs, plain, strict=True))
    ratio, low, high = interval([(a.tokens / a.decode_s) / (b.tokens / b.decode_s) for a, b in both])
    full = [(a.full_tokens / a.full_s) / (b.full_tokens / b.full_s) for a, b in both if a.full_s and b.full_s]
    processor, _, _ = interval([(a.tokens / a.processor_s) / (b.tokens / b.processor_s) for a, b in both])
    tokens_a_step = 1 + sum(run.accepted for run in runs) / max(1, sum(run.samples for run in runs))
    return ratio, f"{low:.2f} to {high:.2f}", interval(full)[0] if full else 0.0, processor, tokens_a_step


if __name__ == "__main__":
    sys.exit(main())
