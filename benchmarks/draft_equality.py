"""Do drafts change an answer? 200 prompts with every drafter, greedy and seeded, compared to the last bit.

Each token, each logprob and each end must be what it is without drafts, alone. In turn: greedy; top-p; penalties with logprobs;
a JSON schema; greedy through an adapter with logprobs; two sequences of one prompt; bias, `min_tokens` and prompt logprobs; an
adapter with min-p and a stop string. Every drafter answers them twice: together, with prefix hits; and in an engine of so few
KV blocks and so small steps that prompts are chunked and sequences preempted.

    python -m benchmarks.draft_equality
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Bench, make_parser, make_progress
from benchmarks.speculation_workloads import Prompts
from cloister.executor.drafters import DRAFTERS
from cloister.models import locate
from tests.equality import MODEL, Report, ask, differing, drafting, make_requests, open_core, prepare, tight

SHARES: Final = {"docs": 64, "edit": 64, "code": 32, "text": 40}
"""Workload -> prompts of it: 200."""
MAX_TOKENS: Final = 32
AGAIN: Final = 24
TOGETHER: Final[dict[str, Any]] = {"max_num_seqs": 16, "prefix_cache": True}


def take_prompts(path: Path, count: int) -> list[tuple[int, ...]]:
    """Returns prompts of every kind, mixed."""
    workloads = Prompts(path).all()
    prompts = [prompt for name, share in SHARES.items() for prompt in workloads[name].prompts[:share]]
    stride = 67  # prime to their number: kinds alternate, and so do what requests ask for
    return [prompts[number * stride % len(prompts)] for number in range(min(count, len(prompts)))]


def main() -> int:
    """Runs the benchmark; the exit status is 1 if a check did not hold."""
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--drafters", nargs="*", default=None, help="only these")
    options = parser.parse_args()
    bench = Bench("draft_equality", "Answers with and without drafts", "all are equal, to the last bit of a logprob")
    with tempfile.TemporaryDirectory() as folder:
        compare_all(bench, options, prepare(Path(folder)))
    return bench.finish(options)


def compare_all(bench: Bench, options: argparse.Namespace, path: Path) -> None:
    """Asks for all answers without drafts, one request at a time, and then with each drafter."""
    names = options.drafters or DRAFTERS.names()
    prompts = take_prompts(locate(MODEL), options.prompts)
    with make_progress() as progress:
        task = progress.add_task("without drafts, alone", total=None)

        def run(again: int = 0, **settings: Any) -> Report:
            core = open_core(path, **settings)
            requests = make_requests(prompts, core, MAX_TOKENS, again)
            progress.reset(task, total=sum(request.sampling.n for request in requests))
            return ask(core, requests, lambda count: progress.advance(task, count))

        wanted = run(speculate="none", max_num_seqs=2, prefix_cache=False)
        rows = []
        for name in names:
            for place, settings in {"together": TOGETHER, "tight": tight(name)}.items():
                progress.update(task, description=f"{name}, {place}")
                found = run(AGAIN, **settings, **drafting(name, path))
                wrong = differing(found, wanted)
                rows.append([name, place, *_figures(found), len(found.answers), len(wrong)])
                bench.check(f"{name}, {place}: answers that differ", len(wrong), high=0)
                bench.check(f"{name}, {place}: drafts accepted", found.num_accepted, low=1)
                if place == "tight":
                    bench.check(f"{name}, {place}: preemptions", found.num_preempted, low=1)
                else:
                    bench.check(f"{name}, {place}: answers after a prefix hit", found.num_hits, low=1)
    headers = ["drafter", "engine", "steps", "drafted", "accepted", "preempted", "prefix hits", "answers", "differ"]
    bench.print_rows("answers", headers, rows)
    bench.figures["tokens"] = sum(len(answer.token_ids) for answer in wanted.answers.values())
    bench.figures["steps without drafts, alone"] = wanted.num_steps


def _figures(report: Report) -> list[int]:
    return [report.num_steps, report.num_drafted, report.num_accepted, report.num_preempted, report.num_hits]


if __name__ == "__main__":
    raise SystemExit(main())
