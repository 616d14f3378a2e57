"""Live migrations and flips of roles under load, on real processes: `python -m benchmarks.migrations --migrations 100`.

Answers of moved requests are compared with those of the same requests that stay. The gap of a migration lies between the last
output before its request changed its replica (`Migrated`) and the first one after it; its stall is what that is longer than a
step, which is the median gap between two outputs of all requests in the run.

With `--flips 100` no request is moved by itself: one prefill and two decode replicas change their roles, one after the other,
which drains each of them first. The load lasts until all flips are done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from cloister.cluster import ReplicaSet
from cloister.engine.replica_snapshot import Role
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.events import Event, Migrated
from cloister.types.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams, SequenceOutput

SHAPE = r"[a-z]{2,8}( [a-z]{2,8}){60,80}\."
EVERY_S = 0.02
"""Time between two migrations of one mover."""
FLIP_EVERY_S = 0.2


@dataclass
class Answer:
    """What came of one request, and when."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, output: SequenceOutput) -> None:
        """Records an output."""
        self.token_ids += output.token_ids
        self.times_s.append(time.monotonic())
        self.finish_reason = output.finish_reason

    @property
    def is_lost(self) -> bool:
        """Whether it has no end, or one that is none of its own."""
        return self.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP)


def make_requests(count: int, prompt_tokens: int, max_tokens: int, run: str) -> list[Answer]:
    """Returns requests, every second one drawn with a seed, every fourth one with a grammar."""
    draw = random.Random(1)
    answers = []
    for number in range(count):
        token_ids = [draw.randrange(300, 3000) for _ in range(prompt_tokens)]
        grammar = Grammar(GrammarKind.REGEX, SHAPE) if number % 4 == 3 else None
        sampling = SamplingParams(
            temperature=0.8 if number % 2 else 0.0, seed=number, max_tokens=max_tokens, ignore_eos=True, grammar=grammar
        )
        answers.append(Answer(Request(request_id=f"{run}{number}", token_ids=token_ids, sampling=sampling)))
    return answers


async def answer_all(cluster: ReplicaSet, answers: Sequence[Answer], at_once: int) -> None:
    """Answers all requests, so many at once."""
    free = asyncio.Semaphore(at_once)

    async def answer(one: Answer) -> None:
        async with free:
            await cluster.follow(one.request, one.take)

    await asyncio.gather(*(answer(one) for one in answers))


@dataclass
class Moves:
    """Migrations: of which answer, and how many outputs it had when it changed its replica.

    Args:
        cluster: of two replicas.
        answers: of its requests.
    """

    cluster: ReplicaSet
    answers: Sequence[Answer]
    done: list[tuple[Answer, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_id = {one.request.request_id: one for one in self.answers}
        self.cluster.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, Migrated) and (one := self._by_id.get(event.request_id)) is not None:
            self.done.append((one, len(one.times_s)))

    async def move(self, count: int, seed: int) -> None:
        """Moves running requests one after the other, until there are so many moves or all have been answered."""
        draw = random.Random(seed)
        while len(self.done) < count:
            await asyncio.sleep(EVERY_S)
            places = self.cluster._places
            running = [name for name, one in self._by_id.items() if one.token_ids and name in places]
            if running:
                name = draw.choice(running)
                await self.cluster.migrate(name, 1 - places[name])
            elif all(one.finish_reason for one in self.answers):
                return

    def stalls_s(self) -> list[float]:
        """Returns the gap at each migration behind which an output came."""
        return [one.times_s[n] - one.times_s[n - 1] for one, n in self.done if 0 < n < len(one.times_s)]


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile of values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def flip_roles(cluster: ReplicaSet, count: int) -> list[float]:
    """Changes the role of one replica after the other, so that each role keeps one; returns how long each flip took."""
    took_s: list[float] = []
    roles: list[Role] = [snapshot.role for snapshot in cluster.snapshots()]
    index = 0
    while len(took_s) < count:
        index = (index + 1) % len(roles)
        if roles.count(roles[index]) == 1:
            continue
        roles[index] = "decode" if roles[index] == "prefill" else "prefill"
        began_s = time.monotonic()
        await cluster.set_role(index, roles[index])
        took_s.append(time.monotonic() - began_s)
        await asyncio.sleep(FLIP_EVERY_S)
    return took_s


@contextlib.asynccontextmanager
async def running(options: argparse.Namespace, **settings: object) -> AsyncIterator[ReplicaSet]:
    """Runs replicas of one thread each."""
    given = {"model": options.model, "num_threads": 1, "block_size": 16, **settings}
    if options.kv_transfer:
        given["kv_transfer"] = options.kv_transfer
    resolved = resolve_settings(given)
    cluster = make_engine(resolved.engine.config, resolved.server.config)
    assert isinstance(cluster, ReplicaSet)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.drain(0.0)


async def measure_flips(options: argparse.Namespace) -> int:
    """Flips roles under load; prints what the clients saw, and returns how many answers were lost or differ."""
    sizes = options.requests, options.prompt_tokens, options.max_tokens
    async with running(options, replicas=1 + 2, prefill=1, decode=2) as cluster:
        stay = make_requests(*sizes, "stay")
        await answer_all(cluster, stay, options.at_once)
        flipping = asyncio.create_task(flip_roles(cluster, options.flips))
        rounds: list[list[Answer]] = []
        while not flipping.done():
            rounds.append(make_requests(*sizes, f"go{len(rounds)}-"))
            await answer_all(cluster, rounds[-1], options.at_once)
        took_s = await flipping
        num_moved = sum(snapshot.num_migrated for snapshot in cluster.snapshots())
    pairs = [(a, b) for go in rounds for a, b in zip(stay, go, strict=True)]
    num_lost = sum(b.is_lost for _, b in pairs)
    num_equal = sum((a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) for a, b in pairs)
    gaps = sorted(y - x for _, b in pairs for x, y in zip(b.times_s, b.times_s[1:], strict=False))
    print(f"{len(took_s)} flips, each in {statistics.median(took_s):.2f} s at P50, {max(took_s):.2f} s at most")
    print(f"{len(pairs)} requests, {options.at_once} at once: {num_lost} lost, {num_equal} identical")
    print(f"{num_moved} running requests moved, hand-overs after the prompt included")
    p50, p99 = (percentile(gaps, share) * 1e3 for share in (0.5, 0.99))
    print(f"gaps in streams: P50 {p50:.1f} ms, P99 {p99:.1f}, max {gaps[-1] * 1e3:.0f}")
    return len(pairs) - num_equal


async def measure(options: argparse.Namespace) -> int:
    """Runs the requests twice, prints what differs, and returns how many answers do."""
    async with running(options, replicas=2) as cluster:
        sizes = options.requests, options.prompt_tokens, options.max_tokens
        stay, go = make_requests(*sizes, "stay"), make_requests(*sizes, "go")
        await answer_all(cluster, stay, options.at_once)
        moves = Moves(cluster, go)
        movers = [moves.move(options.migrations, seed) for seed in range(options.movers)]
        await asyncio.gather(answer_all(cluster, go, options.at_once), *movers)
    gaps = [b - a for one in go for a, b in zip(one.times_s, one.times_s[1:], strict=False)]
    step_s = statistics.median(gaps)
    stalls = [gap_s / step_s - 1 for gap_s in moves.stalls_s()]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(stay, go, strict=True))
    print(
        f"{len(moves.done)} migrations of {len({one.request.request_id for one, _ in moves.done})} requests, "
        f"{options.at_once} at once"
    )
    print(f"equal answers: {equal} of {len(go)}")
    print(f"median step {step_s * 1e3:.2f} ms, P99 of all gaps {percentile(gaps, 0.99) / step_s:.1f} steps")
    figures = [percentile(stalls, 0.5), percentile(stalls, 0.99), max(stalls)]
    print("stall in steps: P50 {:.1f}, P99 {:.1f}, max {:.1f}".format(*figures))
    print("stall in ms: P50 {:.1f}, P99 {:.1f}, max {:.1f}".format(*(steps * step_s * 1e3 for steps in figures)))
    print(f"stalls below one step: {sum(stall < 1 for stall in stalls)} of {len(stalls)}")
    return len(go) - equal


def main() -> int:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--kv-transfer", default="unix", help="empty: tokens only")
    parser.add_argument("--migrations", type=int, default=100)
    parser.add_argument("--movers", type=int, default=1, help="migrations at once")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--flips", type=int, help="flip roles in place of moving requests")
    options = parser.parse_args()
    return 1 if asyncio.run(measure_flips(options) if options.flips else measure(options)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
