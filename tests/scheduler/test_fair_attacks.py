"""Replays of tenants who try to get more than their share of `fair`, each beside an honest one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from cloister.scheduler.policies.fair import DECODE_WEIGHT, Fair
from cloister.types.events import Ended, Event, Progressed
from tests.scheduler.test_scheduler import Bench
from tests.thinning import cover

QUANTUM = 2048
ENGINE = {"max_num_seqs": 8, "num_blocks": 2048, "block_size": 16, "max_tokens": 256, "max_model_len": 16384}


@dataclass
class Tenant:
    """Keeps `width` requests open, under `num_names` names in turn.

    Attributes:
        asks_for: `max_tokens` of each; it is cancelled after `num_tokens`.
    """

    bench: Bench
    name: str
    prompt: int
    num_tokens: int
    width: int
    num_names: int = 1
    n: int = 1
    asks_for: int = 0
    open: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def send(self) -> None:
        while len(self.open) < self.width:
            request, name = f"{self.name} {self.count}", f"{self.name}/{self.count % self.num_names}"
            self.count += 1
            self.open[request] = 0
            most = self.asks_for or self.num_tokens
            self.bench.add(request, [7] * self.prompt, max_tokens=most, tenant=name, n=self.n)

    def see(self, event: Event) -> None:
        match event:
            case Progressed(request_id=request) if request in self.open:
                self.open[request] += 1
                if self.asks_for and self.open[request] == self.num_tokens:
                    self.bench.scheduler.abort(request, self.bench.now)
            case Ended(last=True):
                self.open.pop(event.request_id, None)


class Replay:
    """Steps a scheduler, and lets tenants send and see what happens."""

    def __init__(self) -> None:
        self.bench = Bench(policy="fair", keys=False, **ENGINE)
        self.tenants: list[Tenant] = []
        self.work: dict[str, float] = {}
        self._charge = self.bench.scheduler._policy.charge
        self.bench.scheduler._policy.charge = self._count

    def add(self, name: str, **strategy: int) -> None:
        self.tenants.append(Tenant(self.bench, name, **strategy))

    def step(self) -> list[Event]:
        for tenant in self.tenants:
            tenant.send()
        seen = len(self.bench.events)
        self.bench.step()
        events = self.bench.events[seen:]
        for tenant, event in itertools.product(self.tenants, events):
            tenant.see(event)
        return events

    def _count(self, sequence, num_prefill, num_decode):
        name = sequence.request_state.request.tenant.partition("/")[0]
        self.work[name] = self.work.get(name, 0.0) + num_prefill + DECODE_WEIGHT * num_decode
        self._charge(sequence, num_prefill, num_decode)


STRATEGIES = {
    "splits requests": {"prompt": 16, "num_tokens": 4, "width": 64},
    "sends nothing but the wish for an answer": {"prompt": 1, "num_tokens": 4, "width": 64},
    "asks for long answers": {"prompt": 1, "num_tokens": 500, "width": 64},
    "asks for more than it reads": {"prompt": 64, "num_tokens": 8, "width": 64, "asks_for": 8000},
    "cancels": {"prompt": 64, "num_tokens": 1, "width": 64, "asks_for": 500},
    "asks for eight answers each": {"prompt": 16, "num_tokens": 32, "width": 8, "n": 8},
    "has long prompts": {"prompt": 2000, "num_tokens": 4, "width": 64},
}


@pytest.mark.parametrize(("strategy", "prompt"), cover(STRATEGIES, [256, 4000]))
def test_whatever_a_tenant_does_it_gets_its_share(strategy: str, prompt: int) -> None:
    replay = Replay()
    replay.add("other", **STRATEGIES[strategy])
    replay.add("honest", prompt=prompt, num_tokens=64, width=16)
    for _ in range(250):
        replay.step()
    gap = replay.work["other"] - replay.work.get("honest", 0.0)
    assert abs(gap) < 0.1 * sum(replay.work.values()) + QUANTUM + prompt  # so far a tenant lags before it takes a place


def test_many_names_get_many_shares_and_no_more() -> None:
    replay = Replay()
    replay.add("other", prompt=1, num_tokens=4, width=64, num_names=4)
    replay.add("honest", prompt=256, num_tokens=64, width=16)
    for _ in range(500):
        replay.step()
    assert replay.work["other"] / replay.work["honest"] < 6


@pytest.mark.parametrize(("prompt", "num_names"), cover([2000, 8000, 15_000], [1, 16]))
def test_one_long_prompt_is_no_flood(prompt: int, num_names: int) -> None:
    replay = Replay()
    replay.add("other", prompt=1, num_tokens=4, width=64, num_names=num_names)
    for _ in range(50):
        replay.step()
    replay.bench.add("long", [1] * prompt, max_tokens=4, tenant="honest")
    num_steps = 1
    while not any(isinstance(event, Progressed) and event.request_id == "long" for event in replay.step()):
        num_steps += 1
    assert num_steps <= prompt / (256 - 8) + 8  # its own chunks, beside the answers of seven others, and a place


def test_a_tenant_whose_requests_all_ended_owes_nothing_for_them() -> None:
    replay = Replay()
    replay.add("other", prompt=64, num_tokens=1, width=64, asks_for=500)
    for _ in range(30):
        replay.step()
    for tenant in replay.tenants:
        for request in tenant.open:
            replay.bench.scheduler.abort(request, replay.bench.now)
    replay.bench.run()
    policy = replay.bench.scheduler._policy
    assert isinstance(policy, Fair)
    assert [(tenant.backlog, tenant.queued_behind) for tenant in policy._tenants.values()] == [(0, 0)]


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_request_for_as_many_answers_as_there_are_slots_holds_up_nobody_while_it_waits(policy: str) -> None:
    bench = Bench(policy=policy, keys=False, **ENGINE)
    bench.add("long", [7] * 16, max_tokens=2000, tenant="honest")
    for _ in range(20):
        bench.step()
    bench.add("many", [7] * 16, max_tokens=100, tenant="other", n=8)
    bench.step()
    bench.add("new", [7] * 16, max_tokens=3, tenant="third")
    num_steps = 0
    while not any(isinstance(event, Ended) and event.request_id == "new" for event in bench.events):
        bench.step()
        num_steps += 1
    assert num_steps < 250  # `long` runs for 2000
    bench.run()
    ends = [event for event in bench.events if isinstance(event, Ended) and event.request_id == "many"]
    assert sorted(event.index for event in ends) == list(range(8))
    assert [event.num_output_tokens for event in ends] == [100] * 8


def test_a_newcomer_has_a_slot_soon_beside_a_request_for_as_many_answers_as_there_are_slots() -> None:
    replay = Replay()
    replay.add("other", prompt=16, num_tokens=2000, width=4, n=8)
    for _ in range(100):
        replay.step()
    replay.bench.add("new", [7] * 16, max_tokens=3, tenant="third")
    num_steps = 1
    while not any(isinstance(event, Progressed) and event.request_id == "new" for event in replay.step()):
        num_steps += 1
    assert num_steps < QUANTUM / (8 * DECODE_WEIGHT) + 60
