"""Replicas get new engines while requests go on; whatever is wrong with a new one, the old one stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from cloister.cluster import ROUTERS, ReplicaSet
from cloister.cluster.rolling_update import EngineRelease
from cloister.cluster.routers import Router, RouterContext
from cloister.engine import EngineClient, ProcessTransport
from cloister.engine.core import EngineCore
from cloister.engine.replica_snapshot import UpdateProgress
from cloister.kv import PrefixKeys
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.config import EngineConfig
from cloister.types.errors import InvalidRequestError
from cloister.types.request import ModelInfo, Request, SamplingParams
from tests.engine.forked_engines import spawn_forked
from tests.engine.replica import BLOCK_SIZE, VOCAB_SIZE, build_slow, make_config, make_request
from tests.history_program import greedy_continuation

WAIT_S = 300.0
MODULE = "tests.cluster.test_rolling_update"


def make_router(model: ModelInfo) -> Router:
    return ROUTERS.get("least_load")(RouterContext(PrefixKeys(model.fingerprint, BLOCK_SIZE), random.Random(0)))


def build_other_weights(config: EngineConfig) -> EngineCore:
    core = build_slow(config)
    core.model = msgspec.structs.replace(core.model, fingerprint="other")
    return core


@asynccontextmanager
async def serving(path: Path, new: str = "tests.engine.replica:build_slow") -> AsyncIterator[ReplicaSet]:
    """Two replicas, whose new engines are made by the entry `new`."""

    def make(entry: str) -> EngineClient:
        return EngineClient(ProcessTransport(entry, spawn=spawn_forked), make_config(path))

    old = [make("tests.engine.replica:build_slow") for _ in range(2)]
    replicas = ReplicaSet(
        old,
        make_router,
        release=EngineRelease("old", lambda index, lora: make("tests.engine.replica:build_slow")),
        make_release=lambda model: EngineRelease(model, lambda index, lora: make(new)),
    )
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.drain(0.0)


async def update(replicas: ReplicaSet) -> UpdateProgress:
    """Updates all replicas; returns how that ended."""
    replicas.update_replicas()
    async with asyncio.timeout(WAIT_S):
        while (progress := replicas.update_progress) is None or progress.is_running:
            await asyncio.sleep(0.02)
    return progress


async def answer(replicas: ReplicaSet, request: Request) -> list[int]:
    return [token_id async for output in replicas.generate(request) for token_id in output.token_ids]


async def load(replicas: ReplicaSet, make: Callable[[int], Request], until: Awaitable[object]) -> dict[int, list[int]]:
    """Answers requests, eight at once, until something is done; returns all answers by number."""
    done = asyncio.ensure_future(until)
    answers: dict[int, list[int]] = {}
    numbers = iter(range(10_000))

    async def work() -> None:
        while not done.done():
            number = next(numbers)
            answers[number] = await answer(replicas, make(number))

    await asyncio.gather(*(work() for _ in range(8)))
    await done
    return answers


def pids_of(replicas: ReplicaSet) -> list[int]:
    return [pid for _, pid in replicas.processes]


def test_every_replica_gets_a_new_engine_and_no_request_is_lost(model_path: Path) -> None:
    prompts = [f"request {number}" for number in range(8)]

    async def main() -> None:
        async with serving(model_path) as replicas:
            old = pids_of(replicas)
            replicas._replicas[0].num_restarts = 2
            answers = await load(replicas, lambda n: make_request(prompts[n % 8], max_tokens=30), update(replicas))
            assert replicas.update_progress == UpdateProgress(2, 2, is_running=False)
            assert (replicas.action_counts()["update"], replicas.action_counts()["drain"]) == (1, 0)  # nobody drained any
            assert len(answers) >= 8
            for number, token_ids in answers.items():
                assert token_ids == greedy_continuation(list(prompts[number % 8].encode()), 30, VOCAB_SIZE)
            assert not set(old) & set(pids_of(replicas))
            assert [snapshot.state for snapshot in replicas.snapshots()] == ["running", "running"]
            assert [snapshot.pid for snapshot in replicas.snapshots()] == pids_of(replicas)
            # counters go on, and an update is no restart
            assert [snapshot.num_restarts for snapshot in replicas.snapshots()] == [2, 0]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("tests.engine.replica:build_refusing", "replica 0: .*--max-model-len 7"),
        (f"{MODULE}:build_other_weights", "replica 0: the new engine has the fingerprint other, not .*name the new weights"),
        ("tests.engine.replica:build_wrong", "replica 0: the new engine computed other tokens than a running one"),
    ],
)
def test_an_engine_that_does_not_start_or_is_no_copy_ends_the_update_and_the_old_ones_go_on(
    model_path: Path, entry: str, why: str
) -> None:
    async def main() -> None:
        async with serving(model_path, entry) as replicas:
            old = pids_of(replicas)
            answers = await load(replicas, lambda n: make_request("a", max_tokens=20), update(replicas))
            progress = replicas.update_progress
            assert progress is not None
            assert (progress.num_updated, progress.is_running) == (0, False)
            with pytest.raises(AssertionError, match=why):
                raise AssertionError(progress.error)
            assert pids_of(replicas) == old
            assert all(said == greedy_continuation(list(b"a"), 20, VOCAB_SIZE) for said in answers.values())
            assert [snapshot.is_accepting for snapshot in replicas.snapshots()] == [True, True]
            assert (await update(replicas)).error == progress.error  # it may be tried again

    asyncio.run(main())


def test_a_drained_replica_gets_its_engine_first_and_stands_in_for_the_last_one(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            old = pids_of(replicas)
            await replicas.drain_replica(1)
            answers = await load(replicas, lambda n: make_request("a", max_tokens=20), update(replicas))
            assert replicas.update_progress == UpdateProgress(2, 2, is_running=False)
            assert all(said == greedy_continuation(list(b"a"), 20, VOCAB_SIZE) for said in answers.values())
            assert not set(old) & set(pids_of(replicas))
            assert [replicas._updates.is_drained(index) for index in range(2)] == [False, True]

    asyncio.run(main())


def test_one_update_at_a_time_and_adapters_stay_as_they_are_meanwhile(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            ending = asyncio.create_task(update(replicas))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequestError, match="an update is under way"):
                replicas.update_replicas()
            with pytest.raises(InvalidRequestError, match="when it has ended"):
                await replicas.adapters.unload("one")
            assert not (await ending).error
            assert not replicas.adapters.are_fixed

    asyncio.run(main())


def test_a_server_that_stops_in_the_middle_leaves_no_engine(model_path: Path) -> None:
    async def main() -> None:
        async with serving(model_path) as replicas:
            replicas.update_replicas()
            await asyncio.sleep(0.1)
        assert replicas.processes == []
        assert not replicas._tasks

    asyncio.run(main())


def test_forks_of_a_new_template_answer_as_those_of_the_old_one_did() -> None:
    def make(number: int) -> Request:
        sampling = SamplingParams(max_tokens=60, temperature=0.8 if number % 2 else 0.0, seed=number % 6, ignore_eos=True)
        return Request(request_id=f"r{random.random()}", token_ids=[7 * (number % 6) + i for i in range(40)], sampling=sampling)

    async def main() -> None:
        given = {"model": "cloister-5m", "num_threads": 1, "block_size": 16, "replicas": 2, "kv_transfer": "unix"}
        settings = resolve_settings({**given, "kv_memory_mb": 32})
        replicas = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(replicas, ReplicaSet)
        await replicas.start()
        try:
            alone = [await answer(replicas, make(number)) for number in range(6)]
            old = pids_of(replicas)
            answers = await load(replicas, make, update(replicas))
            assert replicas.update_progress == UpdateProgress(2, 2, is_running=False)
            assert all(said == alone[number % 6] for number, said in answers.items())
            assert not set(old) & set(pids_of(replicas))
        finally:
            await replicas.drain(0.0)

    asyncio.run(main())
