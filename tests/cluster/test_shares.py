"""How many requests each of two replicas gets, in virtual time: equal ones as many, whatever steps take by chance."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from cloister.bench.drive import Timed, drive_client, make_request
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.cluster.health import ReplicaSpeeds, SpeedChange
from cloister.cluster.virtual.engine import TimedRunner
from cloister.cluster.virtual.engine_shape import EngineShape
from cloister.cluster.virtual.event_loop import run_virtually
from cloister.cluster.virtual.prediction import ClusterShape, running_cluster
from cloister.text import Tokenizer
from cloister.types.events import Stepped
from cloister.types.step import StepPlan, StepResult

ENGINE = EngineShape(
    num_blocks=2000, block_size=16, max_num_seqs=64, max_waiting=1000, max_model_len=2048, max_batched_tokens=1024,
    step_s=0.002, token_s=0.0001, sample_s=0.0003,
)  # fmt: skip
NUM_REQUESTS = 80
RATE = 12.0
MOST_STEPS = 40
run_exactly = TimedRunner.run


@dataclass
class BusyMachine:
    """Other programs hold up the steps of each engine, for some steps in a row.

    Attributes:
        factors: one of them is drawn each time; a step takes so many times as long.
        slow: its steps take so many times as long besides, of the engine that makes the first step.
    """

    factors: Sequence[float]
    seed: int
    slow: float = 1.0
    engines: list[TimedRunner] = field(default_factory=list)
    held_up: list[tuple[int, float]] = field(default_factory=list)

    def run(self, runner: TimedRunner, plan: StepPlan) -> StepResult:
        if runner not in self.engines:
            self.engines.append(runner)
            self.held_up.append((0, 1.0))
        index = self.engines.index(runner)
        num_left, factor = self.held_up[index]
        if not num_left:
            draw = random.Random(f"{self.seed} {index} {runner._clock.now()}")
            num_left, factor = draw.randint(1, MOST_STEPS), draw.choice(self.factors)
        self.held_up[index] = (num_left - 1, factor)
        runner.slowness = factor * (1.0 if index else self.slow)
        return run_exactly(runner, plan)


def make_requests(seed: int) -> list[Timed]:
    draw, at_s, requests = random.Random(seed), 0.0, []
    for number in range(NUM_REQUESTS):
        at_s += draw.expovariate(RATE)
        size = draw.choice((20, 80, 300))
        item = WorkItem(at_s, make_tokens((seed, number), size, 256), size, draw.choice((4, 16, 40)))
        requests.append(Timed(at_s, make_request(number, item)))
    return requests


def find_shares(machine: BusyMachine, router: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the share of the requests that each of two replicas got, the smaller one first."""
    monkeypatch.setattr(TimedRunner, "run", lambda runner, plan: machine.run(runner, plan))

    async def drive() -> list[float]:
        async with running_cluster(ClusterShape(ENGINE, router), tokenizer, machine.seed) as cluster:
            await drive_client(cluster, make_requests(machine.seed))
            return sorted(replica.num_routed / NUM_REQUESTS for replica in cluster.snapshots())

    return run_virtually(drive())


@pytest.mark.parametrize(("factors", "seed"), [((1.0,), 1), ((1.0, 1.0, 1.5), 2)], ids=["quiet", "busy"])
def test_conductor_gives_equal_replicas_about_as_many_requests(
    factors: Sequence[float], seed: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With step times of their own, what each had measured by chance decided, and gave one of them 80 and 67%."""
    [smaller, _] = find_shares(BusyMachine(factors, seed), "conductor", tokenizer, monkeypatch)
    assert smaller >= 0.43


def test_conductor_gives_a_replica_that_is_really_slow_few_requests(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    [smaller, _] = find_shares(BusyMachine((1.0, 1.0, 1.5), 0, slow=3.0), "conductor", tokenizer, monkeypatch)
    assert 0.0 < smaller <= 0.3


def test_a_client_that_asks_for_much_of_sampling_makes_no_replica_slow(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the replica that its answer is on take several times as long: it had slowness 3 and got no requests."""
    found: list[float] = []
    note = ReplicaSpeeds.note

    def watch(speeds: ReplicaSpeeds, index: int, step: Stepped, now: float) -> SpeedChange | None:
        change = note(speeds, index, step, now)
        found.append(speeds.slowness(index))
        return change

    monkeypatch.setattr(ReplicaSpeeds, "note", watch)
    requests = []
    for number in range(NUM_REQUESTS):
        at_s = 0.2 * number
        request = make_request(number, WorkItem(at_s, make_tokens((9, number), 20, 256), 20, 30))
        if number % 4 == 0:  # in turns, so these are all on one replica
            asks = msgspec.structs.replace(request.sampling, presence_penalty=0.1, logprobs=20)
            request = msgspec.structs.replace(request, sampling=asks)
        requests.append(Timed(at_s, request))

    async def drive() -> list[int]:
        shape = ClusterShape(dataclasses.replace(ENGINE, process_s=0.02), "round_robin")
        async with running_cluster(shape, tokenizer, 1) as cluster:
            await drive_client(cluster, requests)
            return [replica.num_routed for replica in cluster.snapshots()]

    shares = run_virtually(drive())
    assert max(found) < 1.5
    assert shares == [NUM_REQUESTS // 2] * 2


def test_prefix_aware_gives_equal_idle_replicas_about_as_many_requests(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of equal ones had 64%."""
    [smaller, _] = find_shares(BusyMachine((1.0,), 1), "prefix_aware", tokenizer, monkeypatch)
    assert smaller >= 0.43
