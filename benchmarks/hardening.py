"""What measures cost: start, and time of a token, with and without them, in turns.

Three variants of the same front and engine, started by the launcher: `none` (no measures), `environment` (no measures, in the
environment of a node: its allocator) and `measures` (that environment and every measure, closed). Times of a processor are read
from /proc from outside, so a busy machine disturbs them less; the least of all rounds counts.

    python -m benchmarks.hardening [--model cloister-5m] [--tokens 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloister.models import locate
from cloister.trust.hardening.launching import reading
from cloister.trust.hardening.privileges import measured

VARIANTS = ("none", "environment", "measures")
INNER = Path(__file__).with_name("hardening_node.py")


class Node:
    """One variant, started."""

    def __init__(self, variant: str, model: str, num_tokens: int) -> None:
        arguments = ["", model, str(num_tokens)]
        code = f"import sys, runpy; sys.argv = {arguments!r}; runpy.run_path({str(INNER)!r}, run_name='__main__')"
        reads = [flag for path in reading([locate(model)], [INNER]) for flag in ("--read", path)]
        profile = "private" if variant == "measures" else "open"
        launcher = [sys.executable, "-P", "-s", "-B", "-m", "cloister.trust.hardening", "--profile", profile, "--with-engine"]
        begun_s = time.perf_counter()
        self.process = subprocess.Popen(
            [*launcher, *reads, "timeit", "-n", "1", "-r", "1", "-s", code, "pass"],
            env=dict(os.environ) if variant == "none" else measured(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.engine = int(self._hear()["engine"])
        self.start_s = time.perf_counter() - begun_s

    def generate(self) -> tuple[float, float, int]:
        """One request: (seconds by the clock, seconds of a processor in the engine, tokens)."""
        before = self._processor_s()
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._hear()
        return told["elapsed_s"], self._processor_s() - before, int(told["num_tokens"])

    def end(self) -> None:
        self.process.communicate(timeout=60)

    def _hear(self) -> dict[str, float]:
        assert self.process.stdout is not None
        told: dict[str, float] = json.loads(self.process.stdout.readline())
        return told

    def _processor_s(self) -> float:
        """What the engine's threads used; proc(5), schedstat: nanoseconds on a processor come first."""
        threads = Path(f"/proc/{self.engine}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def running(variant: str, model: str, num_tokens: int) -> Iterator[Node]:
    node = Node(variant, model, num_tokens)
    try:
        yield node
    finally:
        node.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    starts: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    clock_ms: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    processor_ms: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(given.rounds):
        for variant in VARIANTS:
            with running(variant, given.model, given.tokens) as node:
                starts[variant].append(node.start_s)
                node.generate()
                for _ in range(3):
                    elapsed_s, used_s, count = node.generate()
                    clock_ms[variant].append(elapsed_s / count * 1e3)
                    processor_ms[variant].append(used_s / count * 1e3)
    print(f"{given.model}, {given.tokens} tokens a request, {given.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print("variant       start, least s  median s  token by the clock, least ms  median ms  by the processor, least ms")
    for variant in VARIANTS:
        start, clock, used = starts[variant], clock_ms[variant], min(processor_ms[variant])
        print(
            f"{variant:12}  {min(start):14.2f}  {statistics.median(start):8.2f}  "
            f"{min(clock):28.3f}  {statistics.median(clock):9.3f}  {used:27.3f}"
        )


if __name__ == "__main__":
    main()
