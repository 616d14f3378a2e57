"""An engine that nobody needs ends, and is back when a request comes: each is answered, whenever it comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.routers import Router, RouterContext
from cloister.engine import EngineClient, ProcessTransport, Supervision
from cloister.engine.cache_reports import CacheReport
from cloister.engine.client import HOLD_KV_S
from cloister.engine.fork_server import ForkServer
from cloister.engine.request_client import RequestClient
from cloister.engine.supervision import IdleTimer, Restarts
from cloister.kv import PrefixKeys
from cloister.types.events import Arrived, Ended, Event
from cloister.types.request import FinishReason, ModelInfo, Request, SequenceOutput
from cloister.types.scope import LOCAL_SCOPE
from tests.engine.replica import VOCAB_SIZE, make_config, make_request
from tests.engine.test_process import answer, reasons
from tests.history_program import greedy_continuation

IDLE_S = 0.1
DEADLINE_S = 600.0


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a test that must end in time."""
    asyncio.run(asyncio.wait_for(main, DEADLINE_S))


def test_an_engine_is_idle_when_it_had_no_use_for_the_whole_time() -> None:
    timer = IdleTimer(5.0)
    timer.note_use(10.0)
    assert not timer.is_over(14.9)
    timer.note_use(12.0)
    assert not timer.is_over(16.9)
    assert timer.is_over(17.0)
    assert not IdleTimer(None).is_over(1e9)


def test_an_engine_that_lost_a_request_to_another_one_is_not_idle_while_its_kv_may_be_loaded() -> None:
    timer = IdleTimer(5.0)
    timer.note_use(10.0 + HOLD_KV_S)
    timer.note_use(11.0)
    assert not timer.is_over(14.9 + HOLD_KV_S)
    assert timer.is_over(15.0 + HOLD_KV_S)


def make_client(
    path: Path, entry: str = "build", fork_server: ForkServer | None = None, idle_timeout_s: float = IDLE_S
) -> EngineClient:
    """Returns a client of engines that are soon there again, unless a fork server is given."""
    fork_server = fork_server or ForkServer(keeps_template=True)
    supervision = Supervision(
        look_every_s=0.02, idle_timeout_s=idle_timeout_s, restarts=Restarts(max_restarts=2, backoff_s=0.01)
    )
    transport = ProcessTransport(f"tests.engine.replica:{entry}", supervision=supervision, fork_server=fork_server)
    return EngineClient(transport, make_config(path))


@contextlib.asynccontextmanager
async def started(engine: RequestClient) -> AsyncIterator[None]:
    await engine.start()
    try:
        yield
    finally:
        await engine.drain(0.0)


async def until(condition: Callable[[], bool]) -> None:
    give_up_s = asyncio.get_running_loop().time() + DEADLINE_S / 2
    while not condition():
        assert asyncio.get_running_loop().time() < give_up_s, "it did not come to pass"
        await asyncio.sleep(0.01)


async def until_idle(engine: RequestClient) -> None:
    """Waits until no engine runs."""
    await until(lambda: engine.health().is_idle and not engine.processes)


def test_an_idle_engine_ends_and_the_next_request_starts_another(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path)
        async with started(engine):
            first = engine.pid
            await until_idle(engine)
            assert engine.health().good
            request = make_request(max_tokens=20)
            outputs = await answer(engine, request)
            assert [i for o in outputs for i in o.token_ids] == greedy_continuation(request.token_ids, 20, VOCAB_SIZE)
            assert engine.pid != first
            await until_idle(engine)

    run(main())


def test_asking_what_is_cached_starts_no_engine_that_would_have_nothing(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path)
        async with started(engine):
            await until_idle(engine)
            assert await engine.inspect_cache(LOCAL_SCOPE) == CacheReport([], [])
            assert engine.health().is_idle

    run(main())


def test_a_request_for_an_idle_engine_has_arrived_and_the_server_says_that_it_starts(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path)
        events: list[Event] = []
        async with started(engine):
            await until_idle(engine)
            engine.subscribe(events.append)
            request = make_request(max_tokens=1)
            running = asyncio.create_task(answer(engine, request))
            while not events:  # no longer: an engine is there again within milliseconds
                await asyncio.sleep(0)
            assert isinstance(events[0], Arrived)  # metrics count it as waiting
            health = engine.health()
            assert (health.good, health.is_idle, health.is_starting) == (True, False, True)
            assert health.detail == "the engine starts, 1 requests wait for it"
            await running
            assert [type(event) for event in events].count(Arrived) == 1
            assert not engine.health().is_starting

    run(main())


def test_a_request_keeps_its_engine(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path, "build_slow")
        async with started(engine):
            first = engine.pid
            assert reasons(await answer(engine, make_request(max_tokens=10))) == [FinishReason.LENGTH]
            assert engine.pid == first

    run(main())


def test_each_request_is_answered_once_whenever_it_comes(model_path: Path) -> None:
    ends: list[Ended] = []

    async def main() -> None:
        draws = random.Random(3)
        engine = make_client(model_path, idle_timeout_s=0.02)
        engine.subscribe(lambda event: ends.append(event) if isinstance(event, Ended) else None)

        async def ask() -> list[FinishReason]:
            await asyncio.sleep(draws.uniform(0.0, 1.5))
            return reasons(await answer(engine, make_request(max_tokens=draws.randint(1, 5))))

        async with started(engine):
            assert await asyncio.gather(*(ask() for _ in range(40))) == [[FinishReason.LENGTH]] * 40

    run(main())
    assert len({end.request_id for end in ends}) == len(ends) == 40


def test_who_leaves_while_the_engine_is_started_is_forgotten(model_path: Path) -> None:
    ends: list[Ended] = []

    async def main() -> None:
        engine = make_client(model_path)
        engine.subscribe(lambda event: ends.append(event) if isinstance(event, Ended) else None)
        async with started(engine):
            await until_idle(engine)
            leaving, staying = (asyncio.create_task(answer(engine, make_request(max_tokens=3))) for _ in range(2))
            await asyncio.sleep(0)  # both have asked; a fork takes a few milliseconds more
            leaving.cancel()
            assert reasons(await staying) == [FinishReason.LENGTH]

    run(main())
    assert sorted((end.reason, end.num_output_tokens) for end in ends) == [(FinishReason.ABORT, 0), (FinishReason.LENGTH, 3)]


def test_a_wait_for_the_engine_counts_against_the_deadline(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path)
        async with started(engine):
            await until_idle(engine)
            assert reasons(await answer(engine, make_request(timeout_s=0.001))) == [FinishReason.TIMEOUT]

    run(main())


def test_a_request_ends_with_an_error_where_no_engine_starts_any_more(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())

    async def main() -> None:
        engine = make_client(tmp_path, "build_once", ForkServer())
        async with started(engine):
            await until_idle(engine)
            (output,) = await answer(engine, make_request())
            assert output.finish_reason is FinishReason.ERROR
            assert "too often" in str(output.error)
            assert not engine.health().good

    run(main())


def test_an_adapter_can_be_loaded_into_an_idle_engine_and_is_there_after_the_next_rest(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path, "build_loading")
        async with started(engine):
            await until_idle(engine)
            assert (await engine.adapters.load("ann", "somewhere")).name == "ann"
            assert engine.adapters.as_setting(None) == "ann=somewhere"

    run(main())


@pytest.mark.parametrize("keeps", [True, False])
def test_the_template_stays_if_it_is_to(model_path: Path, keeps: bool) -> None:
    async def main() -> None:
        server = ForkServer(keeps_template=keeps)
        engine = make_client(model_path, fork_server=server)
        async with started(engine):
            template = server.pid
            await until_idle(engine)
            if keeps:
                assert server.pid == template
            else:
                await until(lambda: server.pid is None)
            assert reasons(await answer(engine, make_request())) == [FinishReason.LENGTH]
            assert (server.pid == template) is keeps
        assert server.pid is None

    run(main())


def make_router(model: ModelInfo) -> Router:
    return ROUTERS.get("least_load")(RouterContext(PrefixKeys(model.fingerprint, 8), random.Random(0)))


def test_replicas_end_one_by_one_and_come_back_one_by_one(model_path: Path) -> None:
    async def main() -> None:
        server = ForkServer()
        replicas = ReplicaSet([make_client(model_path, "build_slow", server) for _ in range(2)], make_router)
        async with started(replicas):
            await until_idle(replicas)
            assert reasons(await answer(replicas, make_request(max_tokens=2))) == [FinishReason.LENGTH]
            assert len(replicas.processes) <= 1  # the first replica alone was started
            both = await asyncio.gather(*(answer(replicas, make_request(max_tokens=8)) for _ in range(2)))
            assert [reasons(outputs) for outputs in both] == [[FinishReason.LENGTH]] * 2
            await until_idle(replicas)
        assert server.pid is None

    run(main())


def test_an_idle_replica_rests_while_another_one_has_nothing_to_do(model_path: Path) -> None:
    async def main() -> None:
        server = ForkServer(keeps_template=True)
        clients = [make_client(model_path, "build_slow", server, idle_timeout_s) for idle_timeout_s in (IDLE_S, DEADLINE_S)]
        replicas = ReplicaSet(clients, make_router)
        async with started(replicas):
            await until_idle(clients[0])
            for _ in range(8):
                assert reasons(await answer(replicas, make_request(max_tokens=1))) == [FinishReason.LENGTH]
            assert [snapshot.num_routed for snapshot in replicas.snapshots()] == [0, 8]
            await asyncio.gather(*(answer(replicas, make_request(max_tokens=2)) for _ in range(2)))
            assert [snapshot.num_routed for snapshot in replicas.snapshots()] == [1, 9]

    run(main())


@contextlib.asynccontextmanager
async def one_idle(path: Path) -> AsyncIterator[tuple[ReplicaSet, Request, asyncio.Task[list[SequenceOutput]]]]:
    """Two replicas: the first one computes a request, the second one is idle."""
    server = ForkServer(keeps_template=True)
    replicas = ReplicaSet([make_client(path, "build_slow", server) for _ in range(2)], make_router)
    async with started(replicas):
        await replicas.drain_replica(1)
        request = make_request("a long answer", max_tokens=40)
        running = asyncio.create_task(answer(replicas, request))
        await until(
            lambda: (
                [client.health().is_idle for client in replicas._replicas] == [False, True]
                and [snapshot.state for snapshot in replicas.snapshots()] == ["running", "drained"]
            )
        )
        replicas.return_replica(1)
        assert [snapshot.state for snapshot in replicas.snapshots()] == ["running", "idle"]
        yield replicas, request, running


def check_whole(request: Request, outputs: list[SequenceOutput]) -> None:
    assert [i for o in outputs for i in o.token_ids] == greedy_continuation(request.token_ids, 40, VOCAB_SIZE)
    assert reasons(outputs) == [FinishReason.LENGTH]


def test_a_running_request_moves_to_an_idle_replica_once_that_has_started(model_path: Path) -> None:
    async def main() -> None:
        async with one_idle(model_path) as (replicas, request, running):
            assert await replicas.drain_replica(0) == 0
            assert [snapshot.num_requests for snapshot in replicas.snapshots()] == [0, 1]
            assert not replicas.snapshots()[1].is_idle
            check_whole(request, await running)
            assert [snapshot.num_migrated for snapshot in replicas.snapshots()] == [0, 1]

    run(main())


def test_an_answer_of_a_killed_replica_goes_on_in_one_that_was_idle(model_path: Path) -> None:
    async def main() -> None:
        async with one_idle(model_path) as (replicas, request, running):
            os.kill(dict(replicas.processes)["engine 0"], signal.SIGKILL)
            check_whole(request, await running)
            assert [snapshot.num_routed for snapshot in replicas.snapshots()] == [1, 1]

    run(main())


def test_a_request_goes_to_another_replica_if_its_idle_one_cannot_start(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_path / "tokenizer.json").read_bytes())

    async def main() -> None:
        broken, whole = make_client(tmp_path, "build_once", ForkServer()), make_client(model_path)
        replicas = ReplicaSet([broken, whole], make_router)
        async with started(replicas):
            await until_idle(replicas)
            await replicas.drain_replica(1)
            asked = asyncio.create_task(answer(replicas, make_request()))
            await until(lambda: broken.num_requests == 1)
            replicas.return_replica(1)
            assert reasons(await asked) == [FinishReason.LENGTH]
            assert [snapshot.num_routed for snapshot in replicas.snapshots()] == [1, 1]

    run(main())


def test_a_server_that_shuts_down_while_its_engine_rests_ends_at_once(model_path: Path) -> None:
    async def main() -> None:
        engine = make_client(model_path)
        await engine.start()
        await until_idle(engine)
        await asyncio.wait_for(engine.drain(600.0), 300.0)
        assert engine.pid is None

    run(main())
