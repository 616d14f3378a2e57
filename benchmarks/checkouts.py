"""Two checkouts of Cloister in turns on one machine: what a change does to the speed of prefill and decode.

    python -m benchmarks.checkouts --before ../before --model DIR --setting quant=int8

Each checkout runs in its own virtual environment (`.venv`), and both engines stay loaded. They measure each figure one right
after the other, and each pair gives a ratio: a machine whose speed drifts disturbs both alike. Above 1 the change is faster.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

NUM_ROUNDS = 12
NUM_NEW = 24
MODEL_LEN = 2048
VOCAB_SIZE = 4_000
FIGURES = {
    "prefill 512": (1, 512, 1, 0.0),
    "decode 1": (1, 32, NUM_NEW, 0.0),
    "decode 16": (16, 32, NUM_NEW, 0.0),
    "decode 16, sampled": (16, 32, NUM_NEW, 0.8),
}
"""Name: prompts at once, tokens of each, new tokens of each, temperature."""


class Seconds(NamedTuple):
    """What a figure took: on the clock, and of processor time, which other programs disturb less."""

    clock: float
    processor: float


class Worker:
    """The engine of one checkout, in its environment."""

    def __init__(self, checkout: Path, settings: dict[str, Any]) -> None:
        command = [str(checkout / ".venv" / "bin" / "python"), "-P", str(Path(__file__)), json.dumps(settings)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=checkout, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def measure(self, figure: str) -> Seconds:
        """Returns what a figure took.

        Raises:
            RuntimeError: the engine has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(figure + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._process.args!r} ended: run it by hand, with a figure's name as input, to see why")
        return Seconds(*json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def work(settings: dict[str, Any]) -> None:
    """Measures the figures whose names come in, line by line; nothing from `benchmarks`, as the checkout may be old."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from cloister import LLM, SamplingParams

    draw = random.Random(0)
    llm = LLM(prefix_cache=False, max_model_len=MODEL_LEN, max_num_seqs=16, **settings)
    for line in sys.stdin:
        num_prompts, num_tokens, num_new, temperature = FIGURES[line.strip()]
        sampling = SamplingParams(temperature=temperature, max_tokens=num_new, ignore_eos=True, seed=1)
        prompts = [[draw.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_prompts)]
        started = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling)
        replies.write(json.dumps([time.perf_counter() - started[0], time.process_time() - started[1]]) + "\n")
    llm.close()


def compare(before: Worker, after: Worker, num_rounds: int) -> dict[str, list[tuple[Seconds, Seconds]]]:
    """Returns the seconds of both checkouts, by figure and round; who is first changes from round to round."""
    from benchmarks.harness import make_progress

    seconds: dict[str, list[tuple[Seconds, Seconds]]] = {figure: [] for figure in FIGURES}
    with make_progress() as progress:
        for number in progress.track(range(-1, num_rounds), description="rounds"):
            for figure, rows in seconds.items():
                if number % 2:
                    new, old = after.measure(figure), before.measure(figure)
                else:
                    old, new = before.measure(figure), after.measure(figure)
                if number >= 0:
                    rows.append((old, new))
    return seconds


def describe(figure: str, rows: Sequence[tuple[Seconds, Seconds]]) -> tuple[object, ...]:
    """Returns a figure's row: best seconds of now, and the ratios of pairs by clock and by processor time."""
    quarters = [statistics.quantiles((old[i] / new[i] for old, new in rows), n=4) for i in range(2)]
    ranges = [f"{low:.3f} to {high:.3f}" for low, _, high in quarters]
    return figure, min(new.clock for _, new in rows), quarters[0][1], ranges[0], quarters[1][1], ranges[1]


def main() -> int:
    """Compares this checkout with another one; returns the exit status."""
    from benchmarks.harness import ROOT, Bench, make_parser
    from benchmarks.peers.__main__ import read_setting

    parser = make_parser(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout, with its environment in .venv")
    parser.add_argument("--model", default="cloister-5m", help="name or folder of a model that both know")
    parser.add_argument("--setting", action="append", default=[], type=read_setting, help="NAME=VALUE, of both engines")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args()
    bench = Bench("checkouts", "Two checkouts in turns", "every figure within 2%")
    settings = {"model": options.model, "num_threads": options.num_threads, **dict(options.setting)}
    workers = [Worker(checkout.resolve(), settings) for checkout in (options.before, ROOT)]
    try:
        seconds = compare(workers[0], workers[1], options.rounds)
    finally:
        for worker in workers:
            worker.close()
    headers = ("figure", "now, best s", "clock", "quartiles", "processor time", "quartiles of it")
    rows = [describe(figure, rows) for figure, rows in seconds.items()]
    bench.print_rows(f"{options.model}, {options.rounds} rounds; above 1 is faster", headers, rows)
    for figure, *_, median, _ in rows:
        assert isinstance(median, float)
        bench.check(f"{figure}: median of pairs, processor time", median, low=0.98)
    return bench.finish(options)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        sys.exit(main())
