"""Live migrations and flips of roles under load, on real processes: `python -m benchmarks.migrations --migrations 100`.

Answers of moved requests are compared with those of the same requests that stay. The gap of a migration lies between the last
output before its request changed its replica (`Migrated`) and the first one after it. Its stall is how much later that one came
than the next step of the replica that it left, with which it would have come; negative: sooner. In steps: of the median gap
between two outputs of all requests in the run.

Gaps themselves say little: a request changes its replica when the other one is ahead, so most of all while its own one makes a
long step (a prompt of somebody else, or the machine computes something else).

With `--speculate NAME` a drafter proposes tokens. A request that moves leaves the drafter's own state behind (hidden states, KV
of a small model): how many tokens its outputs have behind a move is printed beside all others. `--stop-strings` gives every
third request a stop string from its own answer, most of which span several tokens.

With `--flips 100` no request is moved by itself: one prefill and two decode replicas change their roles, one after the other,
which drains each of them first. The load lasts until all flips are done.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from cloister.cluster import ReplicaSet
from cloister.engine.replica_snapshot import Role
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.events import Event, Migrated, Stepped
from cloister.types.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams, SequenceOutput

SHAPE = r"[a-z]{2,8}( [a-z]{2,8}){60,80}\."
STOP_LENGTH = 12
"""Characters of a stop string."""
NUM_BEHIND = 4
"""Outputs behind a move whose tokens are counted apart."""
EVERY_S = 0.02
"""Time between two migrations of one mover."""
FLIP_EVERY_S = 0.2


@dataclass
class Answer:
    """What came of one request, and when."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def take(self, output: SequenceOutput) -> None:
        """Records an output."""
        self.token_ids += output.token_ids
        self.text += output.text
        self.times_s.append(time.monotonic())
        self.counts.append(len(output.token_ids))
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    @property
    def result(self) -> tuple[list[int], str, FinishReason | None, str | int | None]:
        """What the client has in the end."""
        return self.token_ids, self.text, self.finish_reason, self.stop_reason

    @property
    def is_lost(self) -> bool:
        """Whether it has no end, or one that is none of its own."""
        return self.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP)


def make_requests(
    count: int, prompt_tokens: int, max_tokens: int, run: str, stops: Mapping[int, str] = MappingProxyType({})
) -> list[Answer]:
    """Returns requests, every second one drawn with a seed, every fourth one with a grammar; `stops` by number."""
    draw = random.Random(1)
    answers = []
    for number in range(count):
        token_ids = [draw.randrange(300, 3000) for _ in range(prompt_tokens)]
        grammar = Grammar(GrammarKind.REGEX, SHAPE) if number % 4 == 3 else None
        sampling = SamplingParams(
            temperature=0.8 if number % 2 else 0.0,
            seed=number,
            max_tokens=max_tokens,
            ignore_eos=True,
            grammar=grammar,
            stop=(stops[number],) if number in stops else (),
        )
        answers.append(Answer(Request(request_id=f"{run}{number}", token_ids=token_ids, sampling=sampling)))
    return answers


def choose_stops(answers: Sequence[Answer]) -> dict[int, str]:
    """Returns a stop string for every third request: text from between the middle and the end of what it was answered."""
    stops = {}
    for number, one in enumerate(answers):
        start = len(one.text) * 2 // 3
        if number % 3 == 0 and (stop := one.text[start : start + STOP_LENGTH]):
            stops[number] = stop
    return stops


async def answer_all(cluster: ReplicaSet, answers: Sequence[Answer], at_once: int) -> None:
    """Answers all requests, so many at once."""
    free = asyncio.Semaphore(at_once)

    async def answer(one: Answer) -> None:
        async with free:
            await cluster.follow(one.request, one.take)

    await asyncio.gather(*(answer(one) for one in answers))


@dataclass
class Move:
    """A migration: the replica that the request left, and how many outputs it had."""

    answer: Answer
    source: int
    num_outputs: int

    @property
    def gap_s(self) -> tuple[float, float] | None:
        """When the outputs before and after it came; None if one is missing."""
        times_s = self.answer.times_s
        return (times_s[self.num_outputs - 1], times_s[self.num_outputs]) if 0 < self.num_outputs < len(times_s) else None


@dataclass
class Moves:
    """Migrations of one run.

    Args:
        cluster: of two replicas.
        answers: of its requests.
    """

    cluster: ReplicaSet
    answers: Sequence[Answer]
    done: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_id = {one.request.request_id: one for one in self.answers}
        self._steps_s: list[list[float]] = [[] for _ in self.cluster._replicas]
        for index, replica in enumerate(self.cluster._replicas):
            replica.subscribe(partial(self._note, index))

    def _note(self, index: int, event: Event) -> None:
        if isinstance(event, Stepped):
            self._steps_s[index].append(time.monotonic())
        elif isinstance(event, Migrated) and (one := self._by_id.get(event.request_id)) is not None:
            self.done.append(Move(one, index, len(one.times_s)))

    async def move(self, count: int, seed: int) -> None:
        """Moves running requests one after the other, until there are so many moves or all have been answered."""
        draw = random.Random(seed)
        while len(self.done) < count:
            await asyncio.sleep(EVERY_S)
            places = self.cluster._moves.places
            running = [name for name, one in self._by_id.items() if one.token_ids and name in places]
            if running:
                name = draw.choice(running)
                await self.cluster.migrate(name, 1 - places[name])
            elif all(one.finish_reason for one in self.answers):
                return

    def gaps_s(self) -> list[float]:
        """Returns the gap at each migration behind which an output came."""
        return [gap[1] - gap[0] for move in self.done if (gap := move.gap_s) is not None]

    def stalls_s(self, step_s: float) -> list[float]:
        """Returns how much later than without each migration its output came, if a replica without a step afterwards would
        have taken `step_s`."""
        stalls = []
        for move in self.done:
            if (gap := move.gap_s) is not None:
                steps_s = self._steps_s[move.source]
                number = bisect.bisect_right(steps_s, gap[0])
                stalls.append(gap[1] - (steps_s[number] if number < len(steps_s) else gap[0] + step_s))
        return stalls


def count_tokens(moves: Moves) -> tuple[float, float]:
    """Returns the mean number of tokens of the first outputs behind moves, and of all others but the first ones of answers."""
    behind = {(id(move.answer), move.num_outputs + i) for move in moves.done for i in range(NUM_BEHIND)}
    counts: dict[bool, list[int]] = {True: [], False: []}
    for one in moves.answers:
        for number, count in enumerate(one.counts[:-1]):
            if number:
                counts[(id(one), number) in behind].append(count)
    return statistics.mean(counts[True] or [0]), statistics.mean(counts[False] or [0])


def gaps_of(answers: Sequence[Answer]) -> list[float]:
    """Returns the time between every two outputs of an answer, of all answers."""
    return [b - a for one in answers for a, b in zip(one.times_s, one.times_s[1:], strict=False)]


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
    given = {"model": options.model, "num_threads": 1, "block_size": 16, "on": options.on, **settings}
    if options.kv_transfer != "":
        given["kv_transfer"] = options.kv_transfer or ("shm" if options.on == "local" else "shm,tls")
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
    num_equal = sum(a.result == b.result for a, b in pairs)
    gaps = sorted(gaps_of([b for _, b in pairs]))
    print(f"{len(took_s)} flips, each in {statistics.median(took_s):.2f} s at P50, {max(took_s):.2f} s at most")
    print(f"{len(pairs)} requests, {options.at_once} at once: {num_lost} lost, {num_equal} identical")
    print(f"{num_moved} running requests moved, hand-overs after the prompt included")
    p50, p99 = (percentile(gaps, share) * 1e3 for share in (0.5, 0.99))
    print(f"gaps in streams: P50 {p50:.1f} ms, P99 {p99:.1f}, max {gaps[-1] * 1e3:.0f}")
    return len(pairs) - num_equal


async def measure(options: argparse.Namespace) -> int:
    """Runs the requests twice, prints what differs, and returns how many answers do."""
    sizes = options.requests, options.prompt_tokens, options.max_tokens
    drafting = {name: getattr(options, name) for name in ("speculate", "draft_tokens") if getattr(options, name) is not None}
    async with running(options, replicas=2, **drafting) as cluster:
        stops: dict[int, str] = {}
        if options.stop_strings:
            whole = make_requests(*sizes, "whole")
            await answer_all(cluster, whole, options.at_once)
            stops = choose_stops(whole)
        stay, go = make_requests(*sizes, "stay", stops), make_requests(*sizes, "go", stops)
        await answer_all(cluster, stay, options.at_once)
        moves = Moves(cluster, go)
        movers = [moves.move(options.migrations, seed) for seed in range(options.movers)]
        await asyncio.gather(answer_all(cluster, go, options.at_once), *movers)
    step_s = statistics.median(gaps_of(go))
    equal = sum(a.result == b.result for a, b in zip(stay, go, strict=True))
    num_moved = len({move.answer.request.request_id for move in moves.done})
    print(f"{len(moves.done)} migrations of {num_moved} requests, {options.at_once} at once")
    print(f"equal answers: {equal} of {len(go)}")
    if stops:
        num_cut = sum(bool(move.answer.request.sampling.stop) for move in moves.done)
        num_ended = sum(isinstance(one.stop_reason, str) for one in go)
        print(f"{num_ended} ended at a stop string, {num_cut} of the moves are of requests with one")
    if drafting:
        behind, others = count_tokens(moves)
        print(f"tokens of an output: {behind:.2f} in the first {NUM_BEHIND} behind a move, {others:.2f} in others")
    stalls_s = moves.stalls_s(step_s)
    print(f"median step {step_s * 1e3:.2f} ms; in steps of this, P50, P90, P99 and max:")
    for what, values_s in (
        ("stalls", stalls_s),
        ("gaps at migrations", moves.gaps_s()),
        ("all gaps of this run", gaps_of(go)),
        ("all gaps without migrations", gaps_of(stay)),
    ):
        print(f"{what}: " + ", ".join(f"{percentile(values_s, share) / step_s:.1f}" for share in (0.5, 0.9, 0.99, 1.0)))
    print(f"stalls below one step: {sum(stall_s < step_s for stall_s in stalls_s)} of {len(stalls_s)}")
    return len(go) - equal


def main() -> int:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cloister-5m")
    parser.add_argument("--on", default="local", choices=("local", "ray"))
    parser.add_argument("--kv-transfer", help="empty: tokens only; without it shm, and on Ray shm,tls")
    parser.add_argument("--migrations", type=int, default=100)
    parser.add_argument("--movers", type=int, default=1, help="migrations at once")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--speculate", help="drafters, as of `serve`")
    parser.add_argument("--draft-tokens", type=int, help="as of `serve`")
    parser.add_argument("--stop-strings", action="store_true", help="every third request has a stop string")
    parser.add_argument("--flips", type=int, help="flip roles in place of moving requests")
    options = parser.parse_args()
    return 1 if asyncio.run(measure_flips(options) if options.flips else measure(options)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
