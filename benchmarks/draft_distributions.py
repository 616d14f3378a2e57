"""Do drafts change what is drawn? Every drafter against the exact distribution, by chi-square tests over 100,000 answers each.

A random model of twelve tokens is small enough to enumerate what it may answer (`tests.speculating`): the oracle says how
likely every string of four tokens is under temperature, truncation, penalties, bias and grammar, and real requests through
scheduler, runner and native program are counted against that. Plain sampling goes through the same tests as a control. A bias
of 2% total variation, planted into verification itself, must be found.

    python -m benchmarks.draft_distributions
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import Bench, console, make_parser, make_progress
from cloister.executor import acceptance, generation, verification
from cloister.executor.drafters import DRAFTERS
from tests.drafter_factory import drafter_maker, equip
from tests.speculating import RECIPES, VOCAB, Oracle, Recipe, Replica, draw_answers, holm, make_tiny, p_values

LEVEL: Final = 0.01
"""Of the family of all tests (Holm)."""
CAUGHT: Final = 1e-6
BIAS: Final = 0.02
NUM_DRAFTS: Final = 6
BY_NAME: Final = {recipe.name: recipe for recipe in RECIPES}
CONTROL: Final = "none"
DRAWN: Final = ("draft_model", "spec_infer", "long_spec", "mtp")
"""Drafters whose tokens are drawn by chance where a request has no seed: verified by min(1, p / q). All others' are coupled."""

Case = tuple[str, str, bool, float]
"""Drafter, recipe, whether requests bring seeds, planted bias."""


def list_cases(names: list[str]) -> list[Case]:
    """Returns what is run, fixed before anything is drawn."""
    cases: list[Case] = [(CONTROL, recipe, False, 0.0) for recipe in BY_NAME]
    for name in names:
        recipes = ["plain", "truncated", "everything"] if name in DRAWN else ["adjusted"]
        cases += [(name, recipe, False, 0.0) for recipe in recipes]
    cases += [(name, "everything", True, 0.0) for name in names if name in (*DRAWN, "medusa")]
    cases += [(name, "plain", False, BIAS) for name in names if name in DRAWN]
    cases += [("ngram", "adjusted", False, BIAS)] if "ngram" in names else []
    return cases


@contextmanager
def planted(amount: float) -> Iterator[None]:
    """Moves `amount` of every verified distribution from its likeliest token to the next one: so much total variation.

    Where tokens are coupled there is no distribution to change: there a wrong draft is accepted that often.
    """
    if not amount:
        yield
        return
    right, chosen = acceptance.distribution, generation.TokenGenerator._advance
    rng = np.random.default_rng(5)

    def wrong(scores: Any, draws: Any) -> Any:
        probs = right(scores, draws)
        order = np.argsort(-probs, axis=1)
        rows = np.arange(len(probs))
        moved = np.minimum(amount, probs[rows, order[:, 0]])
        probs[rows, order[:, 0]] -= moved
        probs[rows, order[:, 1]] += moved
        return probs

    def credulous(self: Any, going: Any, logits: Any, finite: Any) -> Any:
        shifted = logits.copy()
        for each in going:
            children = each.children()
            if each.draft.probs is None and children and rng.random() < amount:
                shifted[each.row] = -1e4
                shifted[each.row, each.draft.token_ids[children[0]]] = 0.0
        return chosen(self, going, shifted, finite)

    setattr(verification, "distribution", wrong)  # noqa: B010
    setattr(generation.TokenGenerator, "_advance", credulous)  # noqa: B010
    try:
        yield
    finally:
        setattr(verification, "distribution", right)  # noqa: B010
        setattr(generation.TokenGenerator, "_advance", chosen)  # noqa: B010


def run_case(job: tuple[Case, str, int, int]) -> dict[str, Any]:
    """Draws the answers of one case and tests them."""
    (name, recipe_name, is_seeded, bias), path, num_answers, seed = job
    recipe: Recipe = BY_NAME[recipe_name]
    make = None if name == CONTROL else drafter_maker(name, Path(path))
    started_s = time.perf_counter()
    with planted(bias):
        replica = Replica(Path(path), make, num_drafts=NUM_DRAFTS)
        answers = draw_answers(replica, recipe, num_answers, seed=seed, is_seeded=is_seeded)
    probs = Oracle(Path(path)).strings(recipe)
    told = replica.speculation
    return {
        "drafter": name,
        "recipe": recipe_name,
        "requests": "seeded" if is_seeded else "unseeded",
        "bias": bias,
        "answers": len(answers),
        "p": p_values(answers, probs),
        "drafted per step": told.num_drafted / max(told.num_steps, 1),
        "accepted per step": told.num_accepted / max(told.num_steps, 1),
        "seconds": time.perf_counter() - started_s,
    }


def main() -> int:
    """Runs the benchmark; the exit status is 1 if a check did not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--answers", type=int, default=100_000, help="answers of each case")
    parser.add_argument("--drafters", nargs="*", default=None, help="only these")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = [name for name in options.drafters or DRAFTERS.names() if name in DRAFTERS.names()]
    bench = Bench(
        "draft_distributions",
        "Drafts and the distribution of answers",
        f"no test of a drafter is rejected at {LEVEL} for all together; a bias of {BIAS:.0%} has p < {CAUGHT}",
    )
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(options, names, Path(folder))
    judge(bench, results, names, options.answers)
    return bench.finish(options)


def run_cases(options: argparse.Namespace, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Runs every case in processes of their own; what is done is kept in a file, and a run that was cut off goes on from it."""
    path = make_tiny(folder / "model", seed=options.seed)
    equip(path, np.random.default_rng(options.seed).integers(2, VOCAB, (200, 30)).tolist())
    cases = list_cases(names)
    # one seed for all cases without a bias: what is coupled must then bring the control's very answers
    kept = Path(options.output) / "draft_distributions_partial.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(r["drafter"], r["recipe"], r["requests"] == "seeded", r["bias"], r["answers"]) for r in results}
    cases = [case for case in cases if (*case, options.answers) not in done]
    jobs = [(case, str(path), options.answers, 1000 + options.seed) for case in cases]
    context = multiprocessing.get_context("spawn")
    with make_progress() as progress, context.Pool(options.processes) as pool, kept.open("a") as lines:
        task = progress.add_task("cases", total=len(jobs))
        for result in pool.imap_unordered(run_case, jobs, chunksize=1):
            results.append(result)
            lines.write(json.dumps(result) + "\n")
            lines.flush()
            progress.advance(task)
    if set(names) == set(DRAFTERS.names()):
        kept.unlink()
    return results


def judge(bench: Bench, results: list[dict[str, Any]], names: list[str], num_answers: int) -> None:
    """Corrects for the number of tests and checks what was predicted."""
    honest = [result for result in results if not result["bias"]]
    tests = [(result, test, p) for result in honest for test, p in result["p"].items()]
    rejected = holm([p for *_, p in tests], LEVEL)
    rows = [
        [r["drafter"], r["recipe"], r["requests"], r["bias"], *r["p"].values(), r["drafted per step"], r["accepted per step"]]
        for r in sorted(results, key=lambda r: (r["bias"], r["drafter"], r["recipe"], r["requests"]))
    ]
    headers = ["drafter", "recipe", "requests", "bias", *results[0]["p"], "drafted per step", "accepted per step"]
    bench.print_rows("p-values", headers, rows)
    bench.figures["answers of each case"] = num_answers
    bench.figures["tests"] = len(tests)
    bench.figures["smallest p"] = min(p for *_, p in tests)
    bench.figures["seconds"] = sum(result["seconds"] for result in results)
    for name in [CONTROL, *names]:
        own = [bad for (result, *_), bad in zip(tests, rejected, strict=True) if result["drafter"] == name]
        bench.check(f"{name}: tests of {len(own)} rejected", sum(own), high=0)
    for name in names:
        accepted = min(r["accepted per step"] for r in honest if r["drafter"] == name)
        bench.check(f"{name}: drafts accepted per step, at least", accepted, low=0.01)
    for result in results:
        if result["bias"]:
            what = f"{result['drafter']}, {result['recipe']}: p of a bias of {result['bias']:.0%}"
            bench.check(what, min(result["p"].values()), high=CAUGHT)


if __name__ == "__main__":
    console.print("Seeds are fixed; a run repeats its answers exactly.", style="dim")
    raise SystemExit(main())
