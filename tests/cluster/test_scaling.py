"""Replicas come while requests wait and go when fewer are enough; every request is answered as by one engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cloister.cluster import ReplicaSet, ReplicaSnapshot
from cloister.cluster.action_log import ActionLog
from cloister.cluster.controllers import LoadLevelling
from cloister.cluster.replica_scaling import ReplicaScaling
from cloister.cluster.replica_states import ClusterConfig, ScalingConfig
from cloister.cluster.rolling_update import EngineRelease
from cloister.cluster.scaling import GONE, ReplicaAddition, ReplicaRemoval, ScalingController, choose_first
from cloister.cluster.virtual import fuzz
from cloister.cluster.virtual.scenario import InjectedFault, Job, OperatorAction, Scenario
from cloister.engine import EngineClient, ProcessTransport, Supervision
from cloister.engine.core import EngineCore
from cloister.engine.fork_server import ForkServer
from cloister.engine.replica_snapshot import ReplicaState, Role
from cloister.types.config import EngineConfig
from cloister.types.errors import EngineError, InvalidRequestError, MemoryBudgetError
from cloister.types.events import Ready
from cloister.types.request import Request
from tests.cluster.test_rolling_update import answer, make_router
from tests.engine.fake_transport import MODEL, FakeTransport
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import VOCAB_SIZE, SteppedRunner, make_config, make_replica, make_request
from tests.engine.test_process import until
from tests.history_program import greedy_continuation

DEADLINE_S = 600.0


CALM = ReplicaSnapshot(0, num_slots=8)
BUSY = ReplicaSnapshot(0, num_slots=8, num_requests=9, num_queued=1)


def stopped(role: Role = "mixed", state: ReplicaState = "stopped") -> ReplicaSnapshot:
    return ReplicaSnapshot(0, role=role, is_accepting=False, is_stopped=True, state=state)


def number(replicas: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    return [replace(each, index=index) for index, each in enumerate(replicas)]


class Watch:
    """A controller that looks once a second."""

    def __init__(self, num_min: int = 1, seed: int = 1) -> None:
        self.controller = ScalingController(random.Random(seed), num_min, up_after_s=2.0, down_after_s=10.0)
        self.now = 0.0

    def look(self, *replicas: ReplicaSnapshot, times: int = 1) -> list[tuple[float, ReplicaAddition | ReplicaRemoval]]:
        said = []
        for _ in range(times):
            if (action := self.controller.decide(number(replicas), self.now)) is not None:
                said.append((self.now, action))
            self.now += 1.0
        return said


@pytest.mark.parametrize(
    "busy",
    [
        ReplicaSnapshot(0, num_slots=8, num_queued=1),
        ReplicaSnapshot(0, num_slots=8, num_waiting=1),
        ReplicaSnapshot(0, num_slots=8, num_requests=8),
        ReplicaSnapshot(0, num_slots=8, num_requests=1, num_used_blocks=96, num_total_blocks=100),
        ReplicaSnapshot(0, num_slots=8, num_requests=1, num_pending_tokens=5000, cost=(0.0, 0.001, 0.0, 0.0)),
    ],
)
def test_one_is_added_after_a_while_in_which_requests_wait_or_nothing_is_free(busy: ReplicaSnapshot) -> None:
    assert Watch().look(busy, stopped(), times=4) == [(2.0, ReplicaAddition(1))]
    watch = Watch()
    assert watch.look(busy, stopped(), times=2) == []
    assert watch.look(CALM, stopped()) == []
    assert watch.look(busy, stopped(), times=2) == [], "it was calm between"


def test_searches_that_wait_for_their_share_add_no_replica_and_flip_no_role() -> None:
    held = ReplicaSnapshot(0, num_slots=8, num_requests=5, num_waiting=4, num_held=4)
    idle = ReplicaSnapshot(1, num_slots=8)
    begun: list[str] = []

    def look(replicas: list[ReplicaSnapshot]) -> list[str]:
        states: Any = SimpleNamespace(
            clients=[], standby=set(), roles=["mixed", "mixed"], stopped=set(), snapshots=lambda: number(replicas)
        )
        rest: Any = SimpleNamespace(log_moves=lambda: None, places={}, set_role=lambda index, role: None)

        def begin(task: Coroutine[None, None, None], name: str) -> None:
            task.close()
            begun.append(name)

        begun.clear()
        scaling = ReplicaScaling(
            states, rest, rest, rest, rest, rest, ScalingConfig(num_min=1), random.Random(1), begin, lambda: False
        )
        levelling = LoadLevelling(states, rest, rest, rest, random.Random(1), begin, lambda: False)
        for second in range(10):
            scaling._look(float(second))
            levelling._look(float(second))
        return begun[:]

    assert look([held, stopped()]) == []
    assert look([replace(held, num_held=0), stopped()])[0] == "addition of a replica"
    with_roles = [with_role("prefill", held), with_role("decode", idle), with_role("decode", idle)]
    assert look(with_roles) == []
    assert look([replace(with_roles[0], num_held=0), *with_roles[1:]])[0] == "flip"


def test_a_burst_that_another_replica_can_take_adds_nothing() -> None:
    assert Watch().look(BUSY, CALM, stopped(), times=20) == []


def test_none_is_added_while_one_starts_or_where_all_run() -> None:
    starting = ReplicaSnapshot(0, is_accepting=False, state="starting")
    assert Watch().look(BUSY, starting, stopped(), times=20) == []
    assert Watch().look(BUSY, BUSY, times=20) == []


def test_one_goes_after_a_longer_time_in_which_half_of_the_others_is_enough() -> None:
    few, many = replace(CALM, num_requests=2), replace(CALM, num_requests=3)
    assert Watch().look(few, few, times=12) == [(10.0, ReplicaRemoval(0))]
    assert Watch().look(many, many, times=30) == [], "6 requests are more than half of 8 slots"
    watch = Watch()
    watch.look(few, few, times=9)
    watch.look(many, many)
    assert watch.look(few, few, times=9) == []


def test_which_one_goes_is_drawn_by_capacity() -> None:
    fast = replace(CALM, capacity=3.0)
    drawn = [watch.look(CALM, fast, times=11)[0][1] for watch in (Watch(seed=seed) for seed in range(200))]
    assert 120 < drawn.count(ReplicaRemoval(1)) < 180
    added = [watch.look(BUSY, stopped(), stopped(), times=3)[0][1] for watch in (Watch(seed=seed) for seed in range(50))]
    assert set(added) == {ReplicaAddition(1), ReplicaAddition(2)}


def test_as_many_as_must_stay_stay_and_lost_ones_are_replaced_at_once() -> None:
    assert Watch(num_min=2).look(CALM, CALM, times=30) == []
    for state in GONE:
        gone = ReplicaSnapshot(0, is_accepting=False, state=state)
        assert Watch().look(gone, stopped()) == [(0.0, ReplicaAddition(1))]
        assert Watch().look(CALM, gone, times=30) == [], "the other one is the last"
    restarted = ReplicaSnapshot(0, is_accepting=False, state="starting")
    assert Watch().look(restarted, stopped(), times=5) == []


def test_one_that_an_operator_drained_or_that_stands_by_is_left_alone() -> None:
    assert Watch().look(BUSY, stopped(state="drained"), times=10) == []
    standby = ReplicaSnapshot(0, is_accepting=False, is_standby=True, state="standby")
    assert Watch().look(CALM, standby, times=30) == []
    assert Watch().look(BUSY, standby, times=30) == []


def with_role(role: Role, like: ReplicaSnapshot = CALM) -> ReplicaSnapshot:
    return replace(like, role=role)


def test_a_busy_role_gets_one_of_its_own_or_a_mixed_one() -> None:
    pools = with_role("prefill", BUSY), with_role("decode")
    assert Watch().look(*pools, stopped("decode"), stopped("prefill"), times=3) == [(2.0, ReplicaAddition(3))]
    assert Watch().look(*pools, stopped("decode"), stopped("mixed"), times=3) == [(2.0, ReplicaAddition(3))]
    assert Watch().look(*pools, stopped("decode"), times=30) == []


def test_the_last_of_a_role_stays_but_a_mixed_one_may_go_where_others_do_both() -> None:
    prefill, decode, mixed = map(with_role, ("prefill", "decode", "mixed"))  # type: ignore[arg-type]
    assert Watch().look(prefill, decode, times=30) == []
    assert Watch().look(prefill, decode, mixed, times=11) == [(10.0, ReplicaRemoval(2))]
    assert Watch().look(prefill, decode, replace(mixed, num_requests=1), times=30) == []
    removed = {Watch(seed=seed).look(prefill, decode, decode, times=11)[0][1] for seed in range(20)}
    assert removed == {ReplicaRemoval(1), ReplicaRemoval(2)}
    assert Watch().look(prefill, stopped("decode"), mixed) == [(0.0, ReplicaAddition(1))], "nobody else decodes"


def test_the_first_ones_have_every_role_that_there_must_be() -> None:
    assert choose_first(["mixed"] * 3, 1) == {0}
    assert choose_first(["mixed"] * 3, 0) == {0}
    assert choose_first(["prefill", "prefill", "decode", "mixed"], 1) == {0, 2}
    assert choose_first(["prefill", "prefill", "decode", "mixed"], 3) == {0, 1, 2}


def test_a_removal_that_was_a_mistake_makes_the_next_one_take_twice_as_long() -> None:
    watch, waits = Watch(), []
    for _ in range(3):
        begun_s = watch.now
        [(removed_s, _action)] = watch.look(CALM, CALM, times=100)[:1]
        waits.append(removed_s - begun_s)
        watch.now = removed_s + 1.0
        assert watch.look(BUSY, stopped(), times=3)
    assert waits == [10.0, 20.0, 40.0]
    [(removed_s, _action)] = watch.look(CALM, CALM, times=100)[:1]
    watch.now = removed_s + 2 * 80.0
    watch.look(CALM, stopped())
    begun_s = watch.now
    assert watch.look(CALM, CALM, times=12)[0][0] <= begun_s + 10.0, "it was none"


def test_additions_and_removals_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[ActionLog] = []
    monkeypatch.setattr(ActionLog, "__init__", _remember(counts, ActionLog.__init__))
    burst = tuple(Job(at_s=0.01 * number, prompt="a text of some length", max_tokens=60) for number in range(16))
    outcome = fuzz.replay(Scenario(seed=1, num_replicas=2, min_replicas=1, max_num_seqs=4, jobs=burst))
    assert not outcome.violations
    assert (counts[0].counts["add"], counts[0].counts["remove"]) == (1, 1)


def _remember(found: list[ActionLog], init: Callable[..., None]) -> Callable[..., None]:
    def remember(log: ActionLog, *args: object) -> None:
        init(log, *args)
        found.append(log)

    return remember


BURST = tuple(
    Job(at_s=round(rest_s + 0.01 * number, 2), prompt="a text of some length", max_tokens=60)
    for rest_s in (0.0, 3.0)
    for number in range(16)
)
EVENTS: dict[str, tuple[tuple[InjectedFault, ...], tuple[OperatorAction, ...]]] = {
    "the only one is drained": ((), (OperatorAction(at_s=2.5, kind="drain", replica=0, lasts_s=2.0),)),
    "the first one is lost": ((InjectedFault(at_s=0.6, kind="crash", replica=0),), ()),
    "the new one does not start": ((InjectedFault(at_s=0.0, kind="refuse_start", replica=1, amount=3.0),), ()),
    "an update begins in a burst": ((), (OperatorAction(at_s=0.3, kind="update", weights=None),)),
    "an update begins while one runs": ((), (OperatorAction(at_s=2.5, kind="update", weights=None),)),
    "other weights come while one runs": ((), (OperatorAction(at_s=2.5, kind="update", weights=1),)),
}


@pytest.mark.parametrize("event", EVENTS)
def test_no_request_is_lost_when_something_happens_meanwhile(event: str) -> None:
    faults, operations = EVENTS[event]
    # the queue holds a burst of one tenant, which may have three quarters of it
    scenario = Scenario(seed=1, num_replicas=2, min_replicas=1, max_num_seqs=4, max_waiting=32, jobs=BURST)
    outcome = fuzz.replay(msgspec.structs.replace(scenario, faults=faults, operations=operations))
    assert not outcome.violations
    assert outcome.num_requests == len(BURST)


def test_the_seeds_of_the_fault_search_scale() -> None:
    assert sum(fuzz.scenario_of(seed).min_replicas is not None for seed in range(100)) > 10


# Processes


def build_small(config: EngineConfig) -> EngineCore:
    """A replica with two slots, steps of 20 ms, and a budget of three bytes."""
    core = make_replica(Path(config.model), wrap=lambda r: SteppedRunner(r, step_s=0.02), max_num_seqs=2).core
    core.memory = [("weights", 1), ("KV cache", 2)]
    return core


@contextlib.asynccontextmanager
async def serving(path: Path, scaling: ScalingConfig, num_replicas: int = 2) -> AsyncIterator[tuple[ReplicaSet, ForkServer]]:
    server = ForkServer()

    def make(index: int, lora: str | None) -> EngineClient:
        supervision = Supervision(look_every_s=0.02)
        transport = ProcessTransport(
            "tests.cluster.test_scaling:build_small", supervision=supervision, fork_server=server, replica=index
        )
        return EngineClient(transport, make_config(path, max_num_seqs=2))

    release = EngineRelease("slow", make)
    replicas = ReplicaSet(
        [make(index, None) for index in range(num_replicas)],
        make_router,
        ClusterConfig(scaling=scaling),
        release=release,
        make_release=lambda model: release,
    )
    await replicas.start()
    try:
        yield replicas, server
    finally:
        await replicas.drain(0.0)


def states(replicas: ReplicaSet) -> list[str]:
    return [snapshot.state for snapshot in replicas.snapshots()]


def test_the_memory_that_is_said_is_that_of_all_that_may_run(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, ScalingConfig(1), 3) as (replicas, _):
            assert states(replicas) == ["running", "stopped", "stopped"]
            assert replicas.memory == [("weights", 3), ("KV cache", 6)]

    asyncio.run(main())


def test_memory_that_one_of_several_lacks_names_all_that_share_it(model_path: Path) -> None:
    async def main() -> None:
        clients = [
            EngineClient(ProcessTransport("tests.engine.replica:build_refusing", spawn=spawn_forked), make_config(model_path))
            for _ in range(4)
        ]
        replicas = ReplicaSet(clients, make_router, ClusterConfig(scaling=ScalingConfig(1)))
        with pytest.raises(MemoryBudgetError, match="start fewer replicas: 4 share"):
            await replicas.start()

    asyncio.run(main())


QUICK = ScalingConfig(1, up_after_s=0.1, down_after_s=0.5, look_every_s=0.05)


def test_a_burst_starts_a_fork_of_the_same_template_and_its_process_ends_when_it_is_not_needed(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, QUICK) as (replicas, server):
            assert states(replicas) == ["running", "stopped"]
            assert len(replicas.processes) == 1
            assert replicas.health().detail.startswith("1 of 1 replicas are healthy")
            template = server.pid
            requests = [make_request(f"prompt {number}", max_tokens=40) for number in range(12)]
            asking = [asyncio.create_task(answer(replicas, request)) for request in requests]
            await until(lambda: states(replicas) == ["running", "running"])
            assert server.pid == template
            assert len(replicas.processes) == 2
            for request, asked in zip(requests, asking, strict=True):
                assert await asked == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
            shares = [snapshot.num_routed for snapshot in replicas.snapshots()]
            assert min(shares) > 2, "the waiting ones were shared"
            await until(lambda: sorted(states(replicas)) == ["running", "stopped"])
            assert len(replicas.processes) == 1
            counts = replicas.action_counts()
            assert counts["add"] == counts["remove"] == 1

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_an_adapter_call_an_update_and_a_drain_find_what_is_stopped(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path, replace(QUICK, up_after_s=60.0)) as (replicas, _):
            assert replicas.adapters.loaded == {}
            replicas.update_replicas()
            await until(lambda: (progress := replicas.update_progress) is not None and not progress.is_running)
            assert replicas.update_progress is not None
            assert replicas.update_progress.error == ""
            await until(lambda: sorted(states(replicas)) == ["running", "stopped"] and len(replicas.processes) == 1)
            [alone] = [snapshot.index for snapshot in replicas.snapshots() if not snapshot.is_stopped]
            assert await replicas.drain_replica(alone) == 0
            assert [snapshot.is_accepting for snapshot in replicas.snapshots()][1 - alone], "the other one was started first"
            request: Request = make_request("after", max_tokens=4)
            assert await answer(replicas, request) == greedy_continuation(request.token_ids, 4, VOCAB_SIZE)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


class _Unstartable(FakeTransport):
    """An engine that cannot start."""

    supervision = Supervision()

    async def open(self, config: EngineConfig) -> None:
        raise EngineError("there is no memory for it")


def test_a_drain_is_refused_if_no_other_replica_can_start_or_adapters_change() -> None:
    async def main() -> None:
        transports = [FakeTransport(), _Unstartable()]
        transports[0].ready = Ready(MODEL, [], [])
        clients = [EngineClient(transport, EngineConfig()) for transport in transports]
        config = ClusterConfig(scaling=ScalingConfig(1))
        replicas = ReplicaSet(clients, make_router, config, draw=random.Random(1))
        await replicas.start()
        replicas.adapters.num_calls = 1
        with pytest.raises(InvalidRequestError, match="an adapter is being loaded or unloaded"):
            await replicas.drain_replica(0, 0.5)
        replicas.adapters.num_calls = 0
        with pytest.raises(InvalidRequestError, match="no other replica could be started"):
            await replicas.drain_replica(0, 0.5)
        assert [snapshot.is_accepting for snapshot in replicas.snapshots()] == [True, False]
        await replicas.drain(0)

    asyncio.run(main())
