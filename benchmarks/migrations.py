"""Live migrations under load, on real processes: `python -m benchmarks.migrations --migrations 100`.

Answers of moved requests are compared with those of the same requests that stay. The gap of a migration lies between the last
output before its request changed its replica and the first one after it; its stall is what that is longer than a step, which is
the median gap between two outputs of all requests in the run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cloister.cluster import ReplicaSet
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.request import Request, SamplingParams, SequenceOutput

EVERY_S = 0.1
"""Time between two migrations."""


@dataclass
class Answer:
    """What came of one request, and when."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def take(self, output: SequenceOutput) -> None:
        """Records an output."""
        self.token_ids += output.token_ids
        self.times_s.append(time.monotonic())


def make_requests(count: int, prompt_tokens: int, max_tokens: int, run: str) -> list[Answer]:
    """Returns requests, every second one drawn with a seed."""
    draw = random.Random(1)
    answers = []
    for number in range(count):
        token_ids = [draw.randrange(300, 3000) for _ in range(prompt_tokens)]
        sampling = SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number, max_tokens=max_tokens, ignore_eos=True)
        answers.append(Answer(Request(request_id=f"{run}{number}", token_ids=token_ids, sampling=sampling)))
    return answers


async def answer_all(cluster: ReplicaSet, answers: Sequence[Answer], at_once: int) -> None:
    """Answers all requests, so many at once."""
    free = asyncio.Semaphore(at_once)

    async def answer(one: Answer) -> None:
        async with free:
            await cluster.follow(one.request, one.take)

    await asyncio.gather(*(answer(one) for one in answers))


async def move(cluster: ReplicaSet, answers: Sequence[Answer], count: int) -> list[tuple[Answer, float, float]]:
    """Moves running requests one after the other; returns each with when it was asked for and done."""
    draw = random.Random(2)
    done: list[tuple[Answer, float, float]] = []
    while len(done) < count:
        await asyncio.sleep(EVERY_S)
        running = [one for one in answers if one.token_ids and one.request.request_id in cluster._places]
        if not running:
            if all(len(one.token_ids) == one.request.sampling.max_tokens for one in answers):
                break
            continue
        one = draw.choice(running)
        began_s = time.monotonic()
        target = 1 - cluster._places[one.request.request_id]
        if await cluster.migrate(one.request.request_id, target):
            done.append((one, began_s, time.monotonic()))
    return done


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile of values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(options: argparse.Namespace) -> None:
    """Runs the requests twice, and prints what differs."""
    settings = {"model": options.model, "replicas": 2, "num_threads": 1, "block_size": 16}
    if options.kv_transfer:
        settings["kv_transfer"] = options.kv_transfer
    resolved = resolve_settings(settings)
    cluster = make_engine(resolved.engine.config, resolved.server.config)
    assert isinstance(cluster, ReplicaSet)
    await cluster.start()
    try:
        sizes = options.requests, options.prompt_tokens, options.max_tokens
        stay, go = make_requests(*sizes, "stay"), make_requests(*sizes, "go")
        await answer_all(cluster, stay, options.at_once)
        _, moves = await asyncio.gather(answer_all(cluster, go, options.at_once), move(cluster, go, options.migrations))
    finally:
        await cluster.drain(0.0)
    gaps = [b - a for one in go for a, b in zip(one.times_s, one.times_s[1:], strict=False)]
    step_s = statistics.median(gaps)
    stalls = []
    for one, _, switched_s in moves:
        after = next((number for number, at_s in enumerate(one.times_s) if at_s > switched_s), 0)
        if after:
            stalls.append((one.times_s[after] - one.times_s[after - 1]) / step_s - 1)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(stay, go, strict=True))
    print(
        f"{len(moves)} migrations of {len({one.request.request_id for one, *_ in moves})} requests, {options.at_once} at once"
    )
    print(f"equal answers: {equal} of {len(go)}")
    print(f"median step {step_s * 1e3:.2f} ms, P99 of all gaps {percentile(gaps, 0.99) / step_s:.1f} steps")
    print(f"stall in steps: P50 {percentile(stalls, 0.5):.1f}, P99 {percentile(stalls, 0.99):.1f}, max {max(stalls):.1f}")
    print(f"stalls below one step: {sum(stall < 1 for stall in stalls)} of {len(stalls)}")


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--kv-transfer", default="unix", help="empty: tokens only")
    parser.add_argument("--migrations", type=int, default=100)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
