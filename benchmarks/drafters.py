"""Every drafter on cloister-5m, by itself: what it accepts, and what a draft takes.

    python -m benchmarks.drafters                    # tokens a step with 4, 8 and 16 drafts, trees beside chains; half an hour
    python -m benchmarks.drafters --contexts         # the same behind 1,024 to 16,384 tokens, two drafters
    python -m benchmarks.drafters --ranks            # how often the child of each rank is accepted: RATES of spec_infer.py

A drafter drafts as many tokens as it is asked for, whether that pays or not (`benchmarks.speculation` measures the time that
drafts save). Tokens a step are what was accepted and the one that every step brings. Every settled answer has to be the one
without drafts.

`--contexts` needs a model that makes sense at 16,384 tokens: cloister-5m with a sliding window of 512 in every layer, as
Mistral's config.json says it, has the same weights and stays sane. `draft_model` gets a copy of cloister-draft that says it has
32,768 positions, since it drafts nothing beyond those that a small model says it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np

from benchmarks.harness import MODEL, Bench, make_parser, make_progress
from benchmarks.speculation_runs import DRAFTERS, PLAIN, Run, open_arms
from benchmarks.speculation_workloads import Prompts, Workload
from cloister.executor.drafters import spec_infer
from cloister.models import locate
from cloister.quant.passages import HELD_OUT, read_passages
from cloister.text import Tokenizer

NUM_DRAFTS: Final = (4, 8, 16)
CONTEXTS: Final = (1024, 4096, 8192, 16384)
LONG_DRAFTERS: Final = ("draft_model", "long_spec")
LONG_DRAFTS, LONG_TOKENS, WINDOW, MAX_POSITIONS = 4, 96, 512, 32768
DEPTH, WIDTH = 5, 6
SPINE: Final = tuple(WIDTH * (depth - 1) if depth else -1 for depth in range(DEPTH) for _ in range(WIDTH))
"""Six children for each node of a chain: shows how often the child of each rank is accepted."""
DRAFT: Final = "cloister-draft"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=32, help="of each workload, or of each length of context")
    parser.add_argument("--drafters", default=",".join(DRAFTERS), help="with commas")
    parser.add_argument("--datastore", help="directory of `rest`; unset, the one that comes with the model")
    parser.add_argument("--contexts", action="store_true", help="at the end of long contexts")
    parser.add_argument("--ranks", action="store_true", help="by the rank of a child")
    options = parser.parse_args()
    if options.ranks:
        bench = Bench("drafters_ranks", "How often the child of each rank is accepted", "the rates of spec_infer.py")
        measure_ranks(bench, options)
    elif options.contexts:
        prediction = (
            "with a cache of constant size acceptance is the same at 16,384 tokens as at 1,024; with one that grows it falls"
        )
        bench = Bench("drafters_contexts", "Drafts at the end of long contexts", prediction)
        measure_contexts(bench, options)
    else:
        bench = Bench("drafters", "Every drafter by itself", "a tree has more accepted drafts than a chain of the same size")
        measure_texts(bench, options)
    return bench.finish(options)


def measure_texts(bench: Bench, options: argparse.Namespace) -> None:
    """Answers every workload with each drafter, one sequence at a time."""
    workloads = Prompts(locate(MODEL)).all()
    plain = dict(answer(PLAIN, locate(MODEL), 0, workloads.values(), options))
    rows: list[tuple[object, ...]] = []
    found: dict[tuple[str, int], dict[str, Run]] = {}
    for name, num_drafts in product(options.drafters.split(","), NUM_DRAFTS):
        runs = found[name, num_drafts] = dict(answer(name, locate(MODEL), num_drafts, workloads.values(), options))
        if any(workloads[text].is_settled and run.answers != plain[text].answers for text, run in runs.items()):
            raise SystemExit(f"{name} with {num_drafts} drafts gave another answer")
        took_us = 1e6 * float(np.median([second for run in runs.values() for second in run.draft_s]))
        told = [f"{1 + accepted(run):.2f} ({run.drafted / run.samples:.1f})" for run in runs.values()]
        rows.append((name, num_drafts, *told, round(took_us)))
    headers = ("drafter", "drafts at most", *workloads, "us a draft, median")
    bench.print_rows("Tokens a step (drafted a step)", headers, rows)
    for num_drafts in NUM_DRAFTS:
        chain, tree = (found.get((name, num_drafts), {}) for name in ("draft_model", "spec_infer"))
        for text in chain.keys() & tree.keys() & {"docs", "docs, T 1, seed", "docs, T 1, no seed"}:
            ratio = accepted(tree[text]) / accepted(chain[text])
            bench.check(f"{text}, {num_drafts} drafts: accepted by a tree over a chain", ratio, low=1.0)


def accepted(run: Run) -> float:
    """Returns how many drafts a step accepted."""
    return run.accepted / run.samples


def answer(
    name: str, model: Path, num_drafts: int, workloads: Iterable[Workload], options: argparse.Namespace, **settings: object
) -> Sequence[tuple[str, Run]]:
    """Returns what one drafter did with each workload."""
    flags = {"num_threads": options.num_threads or 1, "draft_tokens": num_drafts or None, "datastore": options.datastore}
    known = {key: value for key, value in (flags | settings).items() if value is not None}
    arms, missing = open_arms([name], model, "none", known)
    if missing:
        raise SystemExit(missing[name])
    with make_progress() as progress:
        steps = progress.track(list(workloads), description=f"{name}, {num_drafts} drafts")
        return [(one.name, arms[name].answer(one, range(min(options.prompts, len(one.prompts))), 1)) for one in steps]


def measure_contexts(bench: Bench, options: argparse.Namespace) -> None:
    """Continues the same texts behind contexts of each length."""
    rows, rates = [], dict[tuple[str, int], float]()
    with tempfile.TemporaryDirectory() as folder:
        model = write_variant(Path(folder) / "windowed", MODEL, has_window=True)
        stretched = write_variant(Path(folder) / "draft", DRAFT, has_window=False)
        tokens = Tokenizer(model).encode(read_passages(HELD_OUT), True)
        ends = np.linspace(max(CONTEXTS), len(tokens), options.prompts).astype(int).tolist()
        for name in LONG_DRAFTERS:
            draft = str(stretched) if name == "draft_model" else DRAFT
            for context in CONTEXTS:
                prompts = tuple(tuple(tokens[end - context : end]) for end in ends)
                text = Workload(f"{context:,} tokens", prompts, LONG_TOKENS, temperature=0.7, ignore_eos=True)
                length = {"max_model_len": context + 2 * LONG_TOKENS, "draft_model": draft}
                ((_, run),) = answer(name, model, LONG_DRAFTS, [text], options, **length)
                rates[name, context] = run.accepted / run.drafted
                rows.append((name, context, rates[name, context], round(1e6 * float(np.median(run.draft_s)))))
    bench.print_rows(
        "4 drafts a step, temperature 0.7", ("drafter", "context", "accepted of drafts", "us a draft, median"), rows
    )
    first, last = CONTEXTS[0], CONTEXTS[-1]
    own, other = (rates["long_spec", length] for length in (first, last))
    bench.check("long_spec: acceptance at 16,384 over that at 1,024", other / own, low=0.95)
    bench.check("acceptance at 16,384: long_spec over draft_model", other / rates["draft_model", last], low=1.1)


def write_variant(directory: Path, name: str, *, has_window: bool) -> Path:
    """Writes an embedded model with `MAX_POSITIONS` positions, and a window if it shall have one; the weights are links."""
    directory.mkdir()
    source = locate(name)
    for file in source.iterdir():
        if file.name not in ("config.json", "drafters"):
            (directory / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_POSITIONS
    if has_window:
        del config["attention_bias"], config["mlp_bias"]  # Mistral has neither
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": WINDOW}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def measure_ranks(bench: Bench, options: argparse.Namespace) -> None:
    """Counts how often the child of each rank is accepted, all depths together."""
    workloads = Prompts(locate(MODEL)).all()
    texts = [workload for name, workload in workloads.items() if name not in ("edit", "random")]
    with mock.patch.multiple(spec_infer, grow_shape=lambda *_: SPINE, MAX_NODES=len(SPINE)):
        found = answer("spec_infer", locate(MODEL), len(SPINE), texts, options)
    counts = {name: count_ranks(run.paths) for name, run in found}
    counts["all"] = np.sum(list(counts.values()), axis=0)
    rows = [(name, int(each[0]), *map(float, each[1:] / each[0])) for name, each in counts.items()]
    bench.print_rows("Accepted by rank", ("text", "nodes", "1st", "2nd", "3rd", "4th", "5th", "6th"), rows)
    first = float(counts["all"][1] / counts["all"][0])
    bench.check("accepted, first child: over the rate of spec_infer.py", first / spec_infer.RATES[0][0], low=0.9)


def count_ranks(paths: Iterable[tuple[int, tuple[int, ...]]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns how many nodes of the spine were reached, and how often the child of each rank was accepted there."""
    counts = np.zeros(1 + WIDTH, np.int64)
    for num_drafted, accepted in paths:
        for depth in range(num_drafted // WIDTH):
            ranks = [place - WIDTH * depth for place in accepted if place // WIDTH == depth]
            counts[0] += 1
            if ranks:
                counts[1 + ranks[0]] += 1
            if ranks != [0]:
                break
    return counts


if __name__ == "__main__":
    sys.exit(main())
