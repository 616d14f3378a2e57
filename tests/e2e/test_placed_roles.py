"""Replicas that something else places have roles, and exchange KV between themselves over mutual TLS. A driver that starts
engine hosts on this machine stands for Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloister.cluster import ReplicaSet
from cloister.cluster.backend import placer
from cloister.engine import RequestClient
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.events import Event, KVLoaded
from cloister.types.request import FinishReason, Grammar, GrammarKind, Request, SamplingParams
from tests.serving import find_processes

ROOT = Path(__file__).parents[2]
FLAGS: dict[str, Any] = {"num_threads": 1, "kv_memory_mb": 64}
PLACED: dict[str, Any] = {**FLAGS, "on": "ray", "replicas": 2, "prefill": 1, "decode": 1, "kv_transfer": "tls"}
SHAPE = r"[a-z]{2,8}( [a-z]{2,8}){20,30}\."
NUM_REQUESTS = 9
WAIT_S = 300.0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(placer, "RayPlacer", partial(placer.RayPlacer, driver="tests.cluster.local_driver"))


def make_requests(run: str) -> list[Request]:
    """Returns greedy requests, seeded ones, and such with a grammar; all are longer than some blocks of KV."""
    requests = []
    for number in range(NUM_REQUESTS):
        grammar = Grammar(GrammarKind.REGEX, SHAPE) if number % 3 == 2 else None
        sampling = SamplingParams(
            temperature=0.0 if number % 3 == 0 else 0.8, seed=number, max_tokens=60, ignore_eos=grammar is None, grammar=grammar
        )
        token_ids = [(7 * i * i + 31 * number + 3 * i) % 2000 for i in range(100 + number)]
        requests.append(Request(request_id=f"{run}{number}", token_ids=token_ids, sampling=sampling))
    return requests


async def answer_all(client: RequestClient, run: str, pieces: list[None]) -> list[list[int]]:
    async def answer(request: Request) -> list[int]:
        token_ids: list[int] = []
        async for output in client.generate(request):
            token_ids += output.token_ids
            pieces.append(None)
        assert output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        return token_ids

    return await asyncio.gather(*map(answer, make_requests(run)))


def engine_pids(others: set[int]) -> list[int]:
    """Returns the engine processes but `others`, which tests before may have left to end, in the order of their start."""
    return [pid for pid in find_processes(os.getpid(), "engine") if pid not in others]


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("victim", [0, pytest.param(-1, marks=pytest.mark.slow)])
def test_answers_are_those_of_one_engine_with_roles_on_several_machines_though_an_engine_is_killed(victim: int) -> None:
    async def run_alone() -> list[list[int]]:
        settings = resolve_settings(FLAGS)
        client = make_engine(settings.engine.config, settings.server.config)
        await client.start()
        try:
            return await answer_all(client, "alone", [])
        finally:
            await client.drain(0.0)

    async def run() -> None:
        expected = await run_alone()
        others = set(find_processes(os.getpid(), "engine"))
        settings = resolve_settings(PLACED)
        cluster = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(cluster, ReplicaSet)
        events: list[Event] = []
        cluster.subscribe(events.append)
        await cluster.start()
        try:
            assert all(str(replica.kv_endpoint).startswith("tls://127.0.0.1:") for replica in cluster._replicas)
            assert await answer_all(cluster, "well", []) == expected
            loaded = [event for event in events if isinstance(event, KVLoaded)]
            assert any(event.complete and event.num_tokens >= 96 for event in loaded)  # a busy machine may miss some deadlines
            prefills, decodes = cluster.snapshots()
            assert (prefills.role, decodes.role) == ("prefill", "decode")
            assert decodes.num_migrated == NUM_REQUESTS
            pieces: list[None] = []
            answers = asyncio.create_task(answer_all(cluster, "killed", pieces))
            await wait_until(lambda: len(pieces) > NUM_REQUESTS)
            os.kill(engine_pids(others)[victim], signal.SIGKILL)
            assert await answers == expected
            await wait_until(lambda: all(snapshot.is_accepting for snapshot in cluster.snapshots()))
            assert await cluster.drain_replica(1, WAIT_S) == 0
            cluster.return_replica(1)
            assert cluster.num_places == cluster.num_shadows == 0
        finally:
            await cluster.drain(0.0)
        await wait_until(lambda: not engine_pids(others))

    asyncio.run(run())
