"""B3, Prepacking: prompts of many lengths in one prefill, without padding.

Prepacking (Zhao et al., 2024): work is the sum of the prompt lengths, not their number times the longest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.harness import Bench, find_scale, make_parser, open_engine, read_azure
from cloister.bench.drive import Drive, SteppingEngine, Timed, drive, make_requests
from cloister.bench.plots import BLUE, GREY, ORANGE, draw
from cloister.bench.workloads import Recipe, build_workload
from cloister.types.request import SamplingParams

LONGEST_TOKENS = 1024
ANSWER_TOKENS = 8


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=32, help="prompts, of Azure lengths scaled to 1024 tokens")
    options = parser.parse_args()
    bench = Bench(
        "prepacking",
        "B3 Prepacking: ragged prompts in one prefill",
        "the tokens computed equal the sum of the prompt lengths, padding would cost several times that, and the answers are "
        "those of the prompts one by one",
    )
    rows = read_azure(options).rows
    recipe = Recipe("burst", num_requests=options.num_prompts, scale=find_scale(rows, LONGEST_TOKENS), seed=options.seed)
    prompts = make_requests(build_workload(read_azure(options), recipe).items)
    engine = open_engine(options, max_num_seqs=options.num_prompts, max_batched_tokens=8192)
    prefills = drive(engine, [limit(timed, 1, "first") for timed in prompts])
    packed = drive(engine, [limit(timed, ANSWER_TOKENS, "packed") for timed in prompts])
    single = run_one_by_one(engine, [limit(timed, ANSWER_TOKENS, "single") for timed in prompts])
    lengths = [len(timed.request.token_ids) for timed in prompts]
    computed, padded = sum(s.num_tokens for s in prefills.recorder.steps), max(lengths) * len(lengths)
    steps = sum(1 for step in prefills.recorder.steps if step.num_tokens)
    headers = ("prompts", "sum of lengths", "tokens computed", "tokens if padded", "prefill steps")
    bench.print_rows("Work", headers, [(len(lengths), sum(lengths), computed, padded, steps)])
    bench.check("tokens computed over the sum of the lengths", computed / sum(lengths), low=1.0, high=1.0)
    same = [packed.token_ids[f"packed-{n}", 0] == single[n] for n in range(len(lengths))]
    bench.check_true(f"{sum(same)} of {len(same)} answers equal those one by one, token for token", all(same))
    with draw(bench.picture(options), bench.title, size=(7.2, 4.2)) as (axes,):
        order = sorted(lengths)
        axes.bar(range(len(order)), order, color=BLUE, label=f"computed: {computed:,} tokens")
        empty = [max(order) - length for length in order]
        axes.bar(range(len(order)), empty, bottom=order, color=GREY, alpha=0.3, label=f"padding saved: {padded - computed:,}")
        axes.axhline(sum(order) / len(order), color=ORANGE, linestyle="--", label="mean length")
        axes.set_xlabel("prompts of one batch, by length")
        axes.set_ylabel("tokens")
        axes.legend(loc="upper left")
    return bench.finish(options)


def limit(timed: Timed, num_tokens: int, prefix: str) -> Timed:
    """Returns the request with an answer of `num_tokens`, under a name of its own."""
    number = timed.request.request_id.rsplit("-", 1)[1]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return Timed(
        0.0, type(timed.request)(request_id=f"{prefix}-{number}", token_ids=timed.request.token_ids, sampling=sampling)
    )


def run_one_by_one(engine: SteppingEngine, requests: Sequence[Timed]) -> list[list[int]]:
    """Returns each request's answer, computed with no company."""
    runs: list[Drive] = [drive(engine, [timed]) for timed in requests]
    return [run.token_ids[timed.request.request_id, 0] for run, timed in zip(runs, requests, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
