"""Running requests make room for one that waits, and for urgent ones: real schedulers, controllers and moves in virtual
time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest

from cloister.cluster import ReplicaSet, controllers
from cloister.cluster.link import LinkTimes
from cloister.cluster.migration import LoadBalancer
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine import VirtualEngine, make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop, run_virtually
from cloister.cluster.virtual.front import make_front
from cloister.cluster.virtual.kv_links import KVSwitch
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.replica import Host
from cloister.types.request import Request, SamplingParams, SequenceOutput

SHAPE = EngineShape(
    num_blocks=72, max_waiting=200, block_size=32, max_model_len=2048, max_batched_tokens=2048, step_s=0.02, token_s=0.0
)
LATER_S = 1.0


@dataclass(frozen=True)
class Sent:
    """A request: the lengths of prompt and answer, its class, and when it comes. They go to the replicas in turns."""

    num_prompt: int
    num_output: int
    priority: int = 0
    at_s: float = 0.0


@dataclass
class Seen:
    """What its client saw: tokens, and when each output came."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def take(self, clock: Callable[[], float], output: SequenceOutput) -> None:
        self.token_ids += output.token_ids
        self.times_s.append(clock())


def make_replicas(num: int, router: str, config: ClusterConfig, draw: random.Random) -> ReplicaSet:
    """Returns a front of virtual engines, which has not been started."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualEventLoop)
    network = VirtualNetwork(draw, 0.0002)
    switch, tokenizer, clock = KVSwitch(network, draw), open_tokenizer(), loop.clock

    def start(index: int) -> VirtualEngine:
        return make_engine(SHAPE, tokenizer, clock)

    hosts = [Host(i, partial(start, i), network, draw, start_s=0.5, times=LinkTimes(), switch=switch) for i in range(num)]
    return make_front(hosts, SHAPE, router, config, draw=draw, clock=clock).replicas


async def serve(sent: Sequence[Sent], rebalance: bool) -> tuple[list[Seen], Mapping[str, int]]:
    """Has two replicas answer requests; returns what clients saw, and what the front did."""
    loop = asyncio.get_running_loop()
    front = make_replicas(2, "round_robin", ClusterConfig(rebalance=rebalance), random.Random(0))
    await front.start()
    began_s = loop.time()
    seen = [Seen() for _ in sent]

    async def answer(number: int) -> None:
        each, words = sent[number], random.Random(number)
        await asyncio.sleep(each.at_s + 0.001 * number)
        sampling = SamplingParams(temperature=0.0, max_tokens=each.num_output, ignore_eos=True)
        token_ids = [words.randrange(256) for _ in range(each.num_prompt)]
        request = Request(request_id=f"r{number}", token_ids=token_ids, sampling=sampling, priority=each.priority)
        await front.follow(request, partial(seen[number].take, lambda: loop.time() - began_s))

    await asyncio.gather(*map(answer, range(len(sent))))
    counts = Counter(front.action_counts())
    await front.drain(0.0)
    return seen, counts


FRAGMENTED = [Sent(800, 220), Sent(800, 220), Sent(400, 220), Sent(400, 220), Sent(1000, 40, at_s=LATER_S)]


def test_a_request_that_fits_nowhere_starts_once_another_one_has_left_its_replica() -> None:
    before, _ = run_virtually(serve(FRAGMENTED, False))
    after, counts = run_virtually(serve(FRAGMENTED, True))
    waits_s = [seen[-1].times_s[0] - LATER_S for seen in (before, after)]
    assert counts["move_to_room"] == 1
    assert waits_s[0] > 3.0
    assert waits_s[1] < 2.0
    assert max(seen.times_s[-1] for seen in after[:-1]) == pytest.approx(
        max(seen.times_s[-1] for seen in before[:-1]), abs=SHAPE.step_s
    )
    assert [seen.token_ids for seen in after] == [seen.token_ids for seen in before]


URGENT = [Sent(820, 400), Sent(80, 240), Sent(820, 400), Sent(80, 240), Sent(240, 320, priority=-1), Sent(80, 240)]


def longest_wait_s(seen: Seen) -> float:
    return max(b - a for a, b in pairwise(seen.times_s))


def test_urgent_requests_keep_room_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    after, counts = run_virtually(serve(URGENT, True))
    monkeypatch.setattr(controllers, "LoadBalancer", partial(LoadBalancer, headroom=0.0))
    before, others = run_virtually(serve(URGENT, True))
    assert (others["move_to_headroom"], counts["move_to_headroom"] > 0) == (0, True)
    assert longest_wait_s(before[4]) > 0.5
    assert longest_wait_s(after[4]) < 2 * SHAPE.step_s
    assert [seen.token_ids for seen in after] == [seen.token_ids for seen in before]


async def drain(num_requests: int) -> tuple[list[int], Mapping[str, int]]:
    """Drains the first of three replicas; returns where its requests went, and what the front did."""
    front = make_replicas(3, "capacity_random", ClusterConfig(), random.Random(2))
    await front.start()
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    requests = [Request(request_id=f"r{i}", token_ids=[i, i + 1], sampling=sampling) for i in range(num_requests)]
    tasks = [asyncio.create_task(front.follow(request, lambda output: None)) for request in requests]
    await asyncio.sleep(0.5)
    before = {name for name, index in front._moves.places.items() if index == 0}
    await front.drain_replica(0)
    targets = [index for name, index in front._moves.places.items() if name in before]
    counts = Counter(front.action_counts())
    await asyncio.gather(*tasks)
    await front.drain(0.0)
    return targets, counts


def test_where_only_a_draw_is_allowed_a_drained_replica_gives_its_requests_away_by_capacity() -> None:
    targets, counts = run_virtually(drain(150))
    assert len(targets) > 30
    shares = Counter(targets)
    assert set(shares) == {1, 2}
    assert min(shares.values()) > len(targets) / 4
    assert abs(shares[1] - shares[2]) > 1, "in turns, or by load, there would be as many for each"
    assert counts["drain"] == 1
    assert sum(counts.values()) == 1
