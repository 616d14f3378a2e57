"""M3, TokenAttention: any block size from 1 to 256 gives the same answers; what each one costs.

LightLLM keeps one token in a block: nothing is wasted, and tables are as long as sequences.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.harness import Bench, make_parser, make_progress, open_engine
from cloister.bench.drive import Drive, drive, make_requests
from cloister.bench.plots import BLUE, ORANGE, draw
from cloister.bench.workloads import WorkItem, make_tokens

BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256)
PROMPT_TOKENS = (5, 33, 100, 257, 700, 1500, 64, 16)
ANSWER_TOKENS = 48


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-rounds", type=int, default=3, help="measured runs of each block size; the best one counts")
    options = parser.parse_args()
    bench = Bench(
        "block_sizes",
        "M3 TokenAttention: block sizes from 1 to 256",
        "answers are equal token for token whatever the block size; small blocks cost time in longer tables, large ones "
        "leave slots unused",
    )
    runs: dict[int, tuple[Drive, float]] = {}
    with make_progress() as progress:
        for size in progress.track(BLOCK_SIZES, description="block sizes"):
            runs[size] = measure(options, size)
    base = runs[16][0].token_ids
    rows = [(size, cost, base == run.token_ids, waste(size)) for size, (run, cost) in runs.items()]
    bench.print_rows("Block sizes", ("block size", "ms a decode step", "same answers", "unused slots, %"), rows)
    bench.check_true("answers equal for every block size", all(same for _, _, same, _ in rows))
    bench.check("block size 1 over 16, time of a decode step", runs[1][1] / runs[16][1], high=3.0)
    with draw(bench.picture(options), bench.title, size=(7.2, 4.2)) as (axes,):
        axes.plot(BLOCK_SIZES, [cost for _, cost, _, _ in rows], "o-", color=BLUE, label="decode step")
        axes.set_xscale("log", base=2)
        axes.set_xticks(BLOCK_SIZES, [str(size) if size != 100 else "" for size in BLOCK_SIZES])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("block size, positions")
        axes.set_ylabel(f"time of a decode step with {len(PROMPT_TOKENS)} sequences, ms", color=BLUE)
        other = axes.twinx()
        other.plot(BLOCK_SIZES, [unused for *_, unused in rows], "s--", color=ORANGE)
        other.set_ylabel("allocated slots that hold nothing, %", color=ORANGE)
        other.set_ylim(bottom=0)
        other.grid(False)
    return bench.finish(options)


def measure(options: argparse.Namespace, block_size: int) -> tuple[Drive, float]:
    """Returns a run, and the best round's median time of its decode steps in milliseconds."""
    engine = open_engine(options, block_size=block_size, max_num_seqs=len(PROMPT_TOKENS), kv_memory_mb=160, max_stall=1e6)
    best, run = float("inf"), None
    for _ in range(options.num_rounds + 1):
        run = drive(engine, make_requests(items(options)))
        decodes = sorted(s.elapsed_s for s in run.recorder.steps if s.num_tokens == len(PROMPT_TOKENS))
        best = min(best, decodes[len(decodes) // 2] * 1e3)
    assert run is not None
    return run, best


def items(options: argparse.Namespace) -> list[WorkItem]:
    return [
        WorkItem(0.0, make_tokens((options.seed, n), length, 2048), length, ANSWER_TOKENS)
        for n, length in enumerate(PROMPT_TOKENS)
    ]


def waste(block_size: int) -> float:
    """Unused slots at the end of the answers, in percent of the allocated ones."""
    used = [length + ANSWER_TOKENS - 1 for length in PROMPT_TOKENS]
    allocated = sum(-(-tokens // block_size) * block_size for tokens in used)
    return 100 * (1 - sum(used) / allocated)


if __name__ == "__main__":
    sys.exit(main())
