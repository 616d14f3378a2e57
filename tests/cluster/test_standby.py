"""A replica that stands by gets no request, takes the place of one that is lost, and gives nothing back."""

from __future__ import annotations

import asyncio
import os
import random
import signal

from cloister.cluster import ReplicaSet, ReplicaSnapshot
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.standby import Promotion, StandbyKeeper
from cloister.cluster.virtual import fuzz
from cloister.cluster.virtual.scenario import InjectedFault, Job, OperatorAction, Scenario
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.request import FinishReason, Request, SamplingParams
from tests import slow_engine

WELL, READY = ReplicaSnapshot(0), ReplicaSnapshot(1, is_standby=True, state="standby")


def decide(*replicas: ReplicaSnapshot) -> list[Promotion]:
    return StandbyKeeper(random.Random(1)).decide(replicas)


def test_only_one_that_is_gone_loses_its_place() -> None:
    assert decide(WELL, READY) == []
    for state in ("stalled", "slow", "suspicious", "idle"):
        assert decide(ReplicaSnapshot(0, state=state), READY) == []  # type: ignore[arg-type]
    for state in ("lost", "starting"):
        assert decide(ReplicaSnapshot(0, state=state), READY) == [Promotion(1, 0)]  # type: ignore[arg-type]


def test_one_that_is_not_ready_takes_no_place_and_there_are_as_many_as_there_are() -> None:
    gone = [ReplicaSnapshot(index, state="starting") for index in (0, 2)]
    assert decide(*gone, READY) == [Promotion(1, 0)]
    assert decide(*gone, ReplicaSnapshot(1, is_standby=True, state="starting")) == []
    assert len(decide(*gone, READY, ReplicaSnapshot(3, is_standby=True, state="standby"))) == 2


def test_who_takes_a_place_is_drawn() -> None:
    ready = [ReplicaSnapshot(index, is_standby=True, state="standby") for index in (1, 2)]
    drawn = {
        StandbyKeeper(random.Random(seed)).decide([ReplicaSnapshot(0, state="lost"), *ready])[0].index for seed in range(20)
    }
    assert drawn == {1, 2}


JOBS = tuple(Job(at_s=0.05 * number, prompt="a text of some length", max_tokens=30) for number in range(12))


def test_a_killed_replica_is_replaced_before_its_requests_go_on(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    places: list[tuple[int, int]] = []
    promote = ReplicaStates.promote

    def note(states: ReplicaStates, index: int, instead_of: int) -> None:
        promote(states, index, instead_of)
        places.append((index, instead_of))

    monkeypatch.setattr(ReplicaStates, "promote", note)
    crash = InjectedFault(at_s=0.3, kind="crash", replica=0)
    outcome = fuzz.replay(Scenario(seed=1, num_replicas=2, num_standby=1, jobs=JOBS, faults=(crash,)))
    assert not outcome.violations
    assert places == [(1, 0)]
    places.clear()
    drain = OperatorAction(at_s=0.3, kind="drain", replica=0, lasts_s=0.2)
    outcome = fuzz.replay(Scenario(seed=1, num_replicas=2, num_standby=1, jobs=JOBS, operations=(drain,)))
    assert not outcome.violations
    assert places == [(1, 0)]


def test_a_killed_engine_process_is_replaced_by_the_one_that_stood_by(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("cloister.launch.processes.ENGINE_ENTRY", slow_engine.ENTRY)
    settings = resolve_settings({"replicas": 2, "standby": 1, "num_threads": 1, "kv_memory_mb": 64})

    async def run() -> None:
        cluster = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(cluster, ReplicaSet)
        await cluster.start()
        try:
            assert [each.state for each in cluster.snapshots()] == ["running", "standby"]
            begun, ends = set[int](), list[FinishReason]()

            async def ask(number: int) -> None:
                sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
                async for output in cluster.generate(
                    Request(request_id=f"r{number}", token_ids=[1, 2, 3, number], sampling=sampling)
                ):
                    begun.add(number)
                    if output.finish_reason is not None:
                        ends.append(output.finish_reason)

            asking = [asyncio.create_task(ask(number)) for number in range(4)]
            async with asyncio.timeout(300):
                while len(begun) < 4:
                    await asyncio.sleep(0.001)
            assert [each.num_requests for each in cluster.snapshots()] == [4, 0]
            pid = cluster.snapshots()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*asking), 300.0)
            assert ends == [FinishReason.LENGTH] * 4
            assert [each.is_standby for each in cluster.snapshots()] == [True, False]
            assert [each.num_promotions for each in cluster.snapshots()] == [0, 1]
            async with asyncio.timeout(300):
                while cluster.snapshots()[0].state == "starting":
                    await asyncio.sleep(0.01)
            assert [each.num_restarts for each in cluster.snapshots()] == [1, 0]
        finally:
            await cluster.drain(0.0)

    asyncio.run(run())
