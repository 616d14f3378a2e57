"""A request that moves has its next token no later than a step after its source would have had it, measured in virtual time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest

from cloister.cluster.link import LinkTimes
from cloister.cluster.replica_states import ClusterConfig
from cloister.cluster.virtual.byte_tokenizer import open_tokenizer
from cloister.cluster.virtual.engine import VirtualEngine, make_engine
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import VirtualEventLoop, run_virtually
from cloister.cluster.virtual.front import make_front
from cloister.cluster.virtual.kv_links import KVSwitch
from cloister.cluster.virtual.network import VirtualNetwork
from cloister.cluster.virtual.replica import Host
from cloister.types.events import Event, Migrated, Stepped
from cloister.types.request import Request, SamplingParams, SequenceOutput

SHAPE = EngineShape(num_blocks=400, max_num_seqs=16, max_waiting=64, token_s=0.0005)
NUM_REQUESTS, AT_ONCE, NUM_MOVERS = 24, 8, 3


async def measure(seed: int, slowness: Sequence[float]) -> tuple[list[float], float]:
    """Moves running requests between two replicas all the time. Returns how much later the next token of each came than the
    next step of the replica that it left (`benchmarks.migrations`), and the median time between two tokens."""
    loop, draw = asyncio.get_running_loop(), random.Random(seed)
    assert isinstance(loop, VirtualEventLoop)
    network = VirtualNetwork(draw, 0.0002)
    switch, tokenizer, clock = KVSwitch(network, draw), open_tokenizer(), loop.clock

    def start(index: int) -> VirtualEngine:
        engine = make_engine(SHAPE, tokenizer, clock)
        engine.runner.slowness = slowness[index]
        return engine

    hosts = [Host(i, partial(start, i), network, draw, start_s=0.5, times=LinkTimes(), switch=switch) for i in range(2)]
    front = make_front(hosts, SHAPE, "round_robin", ClusterConfig(), draw=draw, clock=clock).replicas
    front._avoids_slow = False
    steps_s: list[list[float]] = [[], []]
    tokens_s: dict[str, list[float]] = {}
    moved: list[tuple[int, str, int]] = []
    left = set(range(NUM_REQUESTS))

    def note(index: int, event: Event) -> None:
        if isinstance(event, Stepped):
            steps_s[index].append(loop.time())
        elif isinstance(event, Migrated):
            moved.append((index, event.request_id, len(tokens_s[event.request_id])))

    for index, replica in enumerate(front._replicas):
        replica.subscribe(partial(note, index))
    await front.start()
    free = asyncio.Semaphore(AT_ONCE)

    async def answer(number: int) -> None:
        token_ids = [draw.randrange(256) for _ in range(draw.randrange(60, 120))]
        sampling = SamplingParams(max_tokens=draw.randrange(60, 120), ignore_eos=True)
        request = Request(request_id=f"r{number}", token_ids=token_ids, sampling=sampling)
        times_s = tokens_s[request.request_id] = []

        def take(output: SequenceOutput) -> None:
            times_s.append(loop.time())

        async with free:
            await front.follow(request, take)
        left.discard(number)

    async def keep_moving(mover: random.Random) -> None:
        while left:
            await asyncio.sleep(2 * SHAPE.step_s)
            running = sorted(name for name, times_s in tokens_s.items() if times_s and name in front._moves.places)
            if running:
                name = mover.choice(running)
                await front.migrate(name, 1 - front._moves.places[name])

    movers = [keep_moving(random.Random(number)) for number in range(NUM_MOVERS)]
    await asyncio.gather(*map(answer, range(NUM_REQUESTS)), *movers)
    await front.drain(0.0)
    gaps_s = [b - a for times_s in tokens_s.values() for a, b in pairwise(times_s)]
    stalls_s = []
    for source, name, num_before in moved:
        if 0 < num_before < len(tokens_s[name]):
            before_s, after_s = tokens_s[name][num_before - 1 : num_before + 1]
            stalls_s.append(after_s - next((at_s for at_s in steps_s[source] if at_s > before_s), after_s))
    return stalls_s, statistics.median(gaps_s)


@pytest.mark.parametrize(("seed", "slowness"), [(0, (1.0, 1.0)), (1, (1.5, 1.0))])
def test_no_move_stalls_an_answer_for_a_step(seed: int, slowness: Sequence[float]) -> None:
    """Its source goes on until the target has the next token, also if that is slower and has others' prompts to compute."""
    stalls_s, step_s = run_virtually(measure(seed, slowness))
    assert len(stalls_s) >= 10
    assert max(stalls_s) < step_s
