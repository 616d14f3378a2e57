"""Speculation beside transformers' on one machine in one run: the same model, the same draft model, the same prompts.

    python -m benchmarks.peers.speculation --model DIR      # DIR as for `benchmarks.speculation`; needs torch and transformers

Both in bfloat16, greedy, one sequence: plain, with the draft model (assisted generation; Leviathan et al. 2023), and with
n-grams of the prompt (`prompt_lookup_num_tokens`). Rounds take every way in turn. Times hold the prompt, since transformers
reports none of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Bench, make_parser, make_progress
from benchmarks.inflated import open_inflated
from benchmarks.speculation_report import interval
from benchmarks.speculation_runs import AUTO, PLAIN, open_arms
from benchmarks.speculation_workloads import Prompts, Workload
from cloister.executor.drafters.draft_files import TRAINED

UNTYPED: Any = AutoModelForCausalLM  # its constructors carry no types
OURS: Final = (PLAIN, "draft_model", "ngram", AUTO)
LOOKUP_TOKENS: Final = 10
WAYS: Final[Mapping[str, str]] = {PLAIN: PLAIN, "draft_model": "assisted", "ngram": "prompt lookup"}
"""Ours -> theirs."""
Way = Callable[[Workload, list[int]], tuple[int, float]]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="where the inflated model is, or shall be written")
    parser.add_argument("--rounds", type=int, default=10, help="of each way")
    parser.add_argument("--prompts", type=int, default=2, help="of each round")
    options = parser.parse_args()
    folder = open_inflated(options.model)
    bench = Bench(
        "speculation_peers", "Speculation beside transformers, bf16, one sequence", "ours gains as much, from more tokens/s"
    )
    ways = {**our_ways(folder, options.num_threads), **their_ways(folder, options.num_threads)}
    workloads = Prompts(folder).all()
    for name in ("docs", "edit"):
        runs = measure(workloads[name], ways, options.rounds, options.prompts)
        plain = {maker: runs[maker, PLAIN] for maker in ("cloister", "transformers")}
        rows = []
        for (maker, way), speeds in runs.items():
            ratio, low, high = interval([a / b for a, b in zip(speeds, plain[maker], strict=True)])
            rows.append((f"{maker}, {way}", interval(speeds)[0], ratio, low, high))
        bench.print_rows(f"{name}: {options.rounds} rounds", ("engine", "tokens/s", "over its plain one", "from", "to"), rows)
        for ours, theirs in WAYS.items():
            over = interval([a / b for a, b in zip(runs["cloister", ours], runs["transformers", theirs], strict=True)])[0]
            bench.check(f"{name}: ours ({ours}) over transformers ({theirs}), tokens/s", over, low=1.0)
    return bench.finish(options)


def our_ways(folder: Path, num_threads: int | None) -> dict[tuple[str, str], Way]:
    settings = {} if num_threads is None else {"num_threads": num_threads}
    arms, missing = open_arms(OURS, folder, "none", settings)
    if missing:
        raise SystemExit(f"there are no drafters to compare: {missing}")

    def make(name: str) -> Way:
        def answer(workload: Workload, numbers: list[int]) -> tuple[int, float]:
            run = arms[name].answer(workload, numbers, 1)
            return run.all_tokens, run.whole_s

        return answer

    return {("cloister", name): make(name) for name in arms}


def their_ways(folder: Path, num_threads: int | None) -> dict[tuple[str, str], Way]:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    model = UNTYPED.from_pretrained(folder, dtype=torch.bfloat16).eval()
    draft = UNTYPED.from_pretrained(folder / "drafters" / TRAINED, dtype=torch.bfloat16).eval()
    extras: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "assisted": {"assistant_model": draft},
        "prompt lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    }

    def make(extra: dict[str, Any]) -> Way:
        @torch.inference_mode()
        def answer(workload: Workload, numbers: list[int]) -> tuple[int, float]:
            num_tokens, since_s = 0, time.perf_counter()
            for number in numbers:
                ids = torch.tensor([workload.prompts[number]])
                made = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None,
                    max_new_tokens=workload.max_tokens, **extra,
                )  # fmt: skip
                num_tokens += made.shape[1] - ids.shape[1]
            return num_tokens, time.perf_counter() - since_s

        return answer

    return {("transformers", name): make(extra) for name, extra in extras.items()}


def measure(
    workload: Workload, ways: Mapping[tuple[str, str], Way], rounds: int, num_prompts: int
) -> dict[tuple[str, str], list[float]]:
    """Returns tokens a second of each round; a first round warms up."""
    found: dict[tuple[str, str], list[float]] = {name: [] for name in ways}
    order = list(ways)
    with make_progress() as progress:
        for turn in progress.track(range(rounds + 1), description=workload.name):
            numbers = [(turn * num_prompts + place) % len(workload.prompts) for place in range(num_prompts)]
            for name in order:
                num_tokens, seconds = ways[name](workload, numbers)
                if turn:
                    found[name].append(num_tokens / seconds)
            order = order[1:] + order[:1]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
