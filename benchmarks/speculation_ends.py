"""When the answers of a batch end: the mean one and the last one, with `auto` and without drafts.

    python -m benchmarks.speculation_ends --model DIR      # DIR: as for `benchmarks.speculation`; about 2 minutes

16 requests come at once and nobody after them. Times are those after the step in which the last answer began; a pair is both
engines' run on the same prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, make_parser
from benchmarks.inflated import open_inflated
from benchmarks.speculation_report import interval
from benchmarks.speculation_runs import AUTO, PLAIN, Arm, open_arms, share_weights
from benchmarks.speculation_workloads import Prompts, Workload

NUM_AT_ONCE: Final = 16
PREDICTION: Final = "the mean answer ends sooner, the last one later: whose drafts are never right waits for others'"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="where the inflated model is, or shall be written (2 GB)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of each kind of text")
    options = parser.parse_args()
    bench = Bench("speculation_ends", "When the answers of a batch end", PREDICTION)
    folder = open_inflated(options.model)
    share_weights()
    settings = {"datastore": str(folder / "drafters" / "rest"), "num_threads": options.num_threads}
    arms, _ = open_arms((PLAIN, AUTO), folder, "int8", {name: value for name, value in settings.items() if value is not None})
    rows = []
    for name in ("code", "random"):
        workload = Prompts(folder).all()[name]
        pairs = [[measure(arms[arm], workload, turn) for arm in (PLAIN, AUTO)] for turn in range(options.rounds + 1)][1:]
        for place, which in enumerate(("mean", "last")):
            ratio, low, high = interval([plain[place] / drafted[place] for plain, drafted in pairs])
            rows.append((name, which, ratio, low, high))
    bench.print_rows("Time to an answer's end, none over auto", ("text", "answer", "ratio", "low", "high"), rows)
    for name, which, ratio, *_ in rows:
        bench.check(f"{name}: {which} answer", ratio, low=0.97)
    return bench.finish(options)


def measure(arm: Arm, workload: Workload, turn: int) -> tuple[float, float]:
    """Returns the seconds until the mean answer ended, and the last one."""
    numbers = [(turn * NUM_AT_ONCE + place) % len(workload.prompts) for place in range(NUM_AT_ONCE)]
    run = arm.answer(workload, numbers, NUM_AT_ONCE)
    return run.ends_s / NUM_AT_ONCE, run.decode_s


if __name__ == "__main__":
    raise SystemExit(main())
