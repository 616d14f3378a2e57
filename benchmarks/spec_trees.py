"""Trees of drafts against chains: what SpecInfer's branches bring where as many tokens are verified.

    python -m benchmarks.spec_trees

cloister-5m, drafted for by cloister-draft. First it measures how often the child of each rank is the one that is accepted,
which is where the shape of `executor/drafters/spec_infer.py` comes from; then it answers questions about the documentation with
chains and with trees of 4, 8 and 16 drafts a step, greedy, drawn at temperature 1 with seeds and without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.drafting import Answer, Answering, OpenedModel, tokens_per_step
from benchmarks.harness import MODEL, Bench, make_parser, make_progress
from benchmarks.speculation_workloads import Prompts, Workload
from cloister.executor.drafters import DraftingPlace
from cloister.executor.drafters.draft_files import open_drafts
from cloister.executor.drafters.draft_model import make_draft_model
from cloister.executor.drafters.spec_infer import RATES, SpecInferDrafter, make_spec_infer
from cloister.executor.drafters.token_trees import grow_shape
from cloister.models import locate

BUDGETS: Final = (4, 8, 16)
MEASURED: Final = ("docs", "docs, T 1, seed", "docs, T 1, no seed", "text", "code")
COMPARED: Final = ("docs", "docs, T 1, seed", "docs, T 1, no seed")
DEPTH, WIDTH = 5, 6
MAX_LEN = 1024
PREDICTION = (
    "a tree brings more tokens a step than a chain of as many drafts, the more the larger the budget; seeded answers are the "
    "same tokens as without drafts"
)


class SpineDrafter(SpecInferDrafter):
    """Drafts `WIDTH` children for each node of a chain: what shows how often the child of each rank is accepted."""

    def __init__(self, place: DraftingPlace) -> None:
        super().__init__(place, open_drafts(place))
        self.shape = tuple(WIDTH * (depth - 1) if depth else -1 for depth in range(DEPTH) for _ in range(WIDTH))
        self.max_drafts = len(self.shape)


def main() -> int:
    """Measures, compares, and says what held."""
    parser = make_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    options = parser.parse_args()
    bench = Bench("spec_trees", "Trees of drafts against chains", PREDICTION)
    opened = OpenedModel(locate(MODEL), options.num_threads or 1)
    workloads = Prompts(locate(MODEL)).all()
    measure_rates(bench, opened, [workloads[name] for name in MEASURED], options)
    compare(bench, opened, [workloads[name] for name in COMPARED], options)
    return bench.finish(options)


def answer_all(answering: Answering, workload: Workload, num_drafts: int, options: argparse.Namespace) -> list[Answer]:
    """Answers the first prompts of a workload, one after another."""
    found = []
    with make_progress() as progress:
        prompts = list(enumerate(workload.prompts[: options.num_prompts]))
        for number, prompt in progress.track(prompts, description=f"{workload.name}, {num_drafts} drafts"):
            seed = options.seed + number
            found.append(answering.answer(prompt, workload.sampling(number), num_drafts, seed, to_the_end=workload.ignore_eos))
    return found


def measure_rates(bench: Bench, opened: OpenedModel, workloads: Sequence[Workload], options: argparse.Namespace) -> None:
    """Measures how often the child of each rank is accepted, all depths together, and what shape follows from that."""
    answering = Answering(opened, SpineDrafter, MAX_LEN)
    counts = [count_ranks(answer_all(answering, workload, DEPTH * WIDTH, options)) for workload in workloads]
    total = np.sum(counts, axis=0)
    rows = [(each.name, int(found[0]), *(found[1:] / found[0])) for each, found in zip(workloads, counts, strict=True)]
    rows.append(("all", int(total[0]), *(total[1:] / total[0])))
    bench.print_rows(
        "How often the child of each rank is accepted", ("text", "nodes", "1st", "2nd", "3rd", "4th", "5th", "6th"), rows
    )
    rates = [tuple(float(rate) for rate in total[1:] / total[0])] * len(RATES)
    kept = []
    for budget in BUDGETS:
        best, own = grow_shape(rates, budget), grow_shape(RATES, budget)
        kept.append((budget, expected_accepted(own, rates), expected_accepted(best, rates), str(list(own))))
    bench.print_rows("Accepted drafts expected of a shape", ("drafts", "of spec_infer", "of the best", "parents"), kept)
    for budget, own_accepted, best_accepted, _ in kept:
        bench.check(f"{budget} drafts: the shape over the best for these rates", own_accepted / best_accepted, low=0.98)


def expected_accepted(parents: Sequence[int], rates: Sequence[Sequence[float]]) -> float:
    """Returns how many drafts of a tree are accepted on average if children are accepted at these rates."""
    chances: list[float] = []
    depths: list[int] = []
    num_children: dict[int, int] = {}
    for parent in parents:
        depth = 0 if parent < 0 else depths[parent] + 1
        rank = num_children.get(parent, 0)
        num_children[parent] = rank + 1
        rate = rates[depth][rank] if depth < len(rates) and rank < len(rates[depth]) else 0.0
        chances.append((1.0 if parent < 0 else chances[parent]) * rate)
        depths.append(depth)
    return sum(chances)


def count_ranks(answers: Sequence[Answer]) -> npt.NDArray[np.int64]:
    """Returns how many nodes of the spine were reached, and how often the child of each rank was accepted there."""
    counts = np.zeros(1 + WIDTH, np.int64)
    for sample in [sample for answer in answers for sample in answer.samples]:
        for depth in range(sample.num_drafted // WIDTH):
            ranks = [place - WIDTH * depth for place in sample.accepted if place // WIDTH == depth]
            counts[0] += 1
            if ranks:
                counts[1 + ranks[0]] += 1
            if ranks != [0]:
                break
    return counts


def compare(bench: Bench, opened: OpenedModel, workloads: Sequence[Workload], options: argparse.Namespace) -> None:
    """Answers with chains and with trees of the same budgets."""
    plain = Answering(opened, None, MAX_LEN)
    chain, tree = Answering(opened, make_draft_model, MAX_LEN), Answering(opened, make_spec_infer, MAX_LEN)
    rows: list[tuple[str, int, float, float, float]] = []
    for workload in workloads:
        expected = [answer.tokens for answer in answer_all(plain, workload, 0, options)] if workload.is_settled else None
        for budget in BUDGETS:
            chains, trees = (answer_all(each, workload, budget, options) for each in (chain, tree))
            if expected is not None:
                same = all([answer.tokens for answer in answers] == expected for answers in (chains, trees))
                bench.check_true(f"{workload.name}, {budget} drafts: the same tokens as without", same)
            of_chain, of_tree = tokens_per_step(chains), tokens_per_step(trees)
            ratio = (of_tree - 1) / (of_chain - 1)
            rows.append((workload.name, budget, of_chain, of_tree, ratio))
            bench.check(f"{workload.name}, {budget} drafts: accepted by a tree over a chain", ratio, low=1.0)
    headers = ("answers", "drafts", "chain, tokens a step", "tree", "accepted, tree over chain")
    bench.print_rows("Tokens a step", headers, rows)


if __name__ == "__main__":
    raise SystemExit(main())
