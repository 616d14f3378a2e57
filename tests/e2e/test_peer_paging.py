"""Engines that page out to each other's memory: the same bits, and in processes the same tokens while one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloister.cluster import ReplicaSet
from cloister.engine.kv_pool import KVPool
from cloister.launch import build_engine
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.events import Event, KVLoaded, Preempted, Scheduled
from cloister.types.request import Request, SamplingParams
from cloister.types.scope import LOCAL_SCOPE
from tests.e2e.test_kv_tiers import CASES, Runner, kv_mb, make_config, prompt
from tests.thinning import thin

NUM_REQUESTS = 8
NUM_OUTPUT = 80
WAIT_S = 300.0


class Burst:
    """A burst at the first of two replicas; the other one has nothing to do."""

    def __init__(self, cluster: ReplicaSet) -> None:
        self.cluster, self.events, self.num_tokens = cluster, list[Event](), 0
        cluster.subscribe(self.events.append)

    async def answer(self, name: str) -> list[list[int]]:
        self.num_tokens = 0
        prompts = [[(7 * i * i + 3 * i + 13 * number) % 2000 for i in range(150)] for number in range(NUM_REQUESTS)]
        return list(await asyncio.gather(*(self._answer(f"{name} {i}", prompt) for i, prompt in enumerate(prompts))))

    async def _answer(self, name: str, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, token_ids=prompt, sampling=sampling, timeout_s=WAIT_S)
        tokens: list[int] = []
        async for output in self.cluster.generate(request):
            tokens += output.token_ids
            self.num_tokens += len(output.token_ids)
        return tokens

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    async def kill(self, num_tokens: int) -> None:
        """Kills the lender when so many tokens have come."""
        while self.num_tokens < num_tokens:
            await asyncio.sleep(0.0005)
        pid = self.cluster._replicas[1].pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("case", thin(CASES, ("states",)))
def test_what_a_neighbour_kept_has_the_bits_of_what_was_computed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    config = make_config(tmp_path, *CASES[case])
    config = replace(config, kv_memory_mb=kv_mb(config) / 2)  # two prompts of 154 tokens do not fit
    pool = KVPool(int(2**18 + 2 * 2**20 * kv_mb(config)), 2)
    first, second = Runner(build_engine(config)), Runner(build_engine(config))
    for engine in (first, second):
        engine.core.open_kv_tiers("peer:1M", (os.dup(pool.fd), pool.take_seat()), admission="always")  # type: ignore[arg-type]
    tiers = first.core._tiers.tiers  # type: ignore[union-attr]
    tiers.predict_s = lambda tier_bytes: 0.0  # type: ignore[method-assign]
    try:
        second.answer("warm up", prompt(9))
        expected = first.answer("first", prompt(0))
        for number in range(1, 30):
            first.answer(f"other {number}", prompt(number))
            first.run_until(lambda: not any(index._unwritten for index in tiers.indexes))
            if len(tiers.indexes[1]) > 3:
                break
        assert first.answer("again", prompt(0)) == expected
    finally:
        for engine in (first, second):
            engine.core._tiers.tiers.check()  # type: ignore[union-attr]
            engine.core._tiers.close()  # type: ignore[union-attr]
    loaded = first.find(KVLoaded, "again")
    assert "peer" in loaded.tier
    assert loaded.complete
    assert first.find(Scheduled, "again").num_cached_tokens == loaded.num_tokens > 0


@pytest.mark.slow  # tests/engine/test_kv_peer_loans.py has the same without processes
def test_a_burst_has_the_same_tokens_while_the_neighbour_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.launch.processes.ENGINE_ENTRY", "tests.pool_member:build_loading_engine")
    flags: dict[str, Any] = {"replicas": 2, "num_threads": 1, "max_model_len": 256, "max_num_seqs": 3, "kv_memory_mb": 1.0}
    settings = resolve_settings(flags | {"scheduler": "cfs", "kv_tier": "peer:1M"})

    async def run() -> None:
        cluster = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(cluster, ReplicaSet)
        await cluster.start()
        try:
            await cluster.drain_replica(1)
            burst = Burst(cluster)
            expected = await burst.answer("whole")
            assert burst.count(Preempted) > 0
            assert any(isinstance(event, KVLoaded) and "peer" in event.tier for event in burst.events), "nothing was paged out"
            for part in (1, 3, 5):
                await cluster.inspect_cache(LOCAL_SCOPE, drop=True)
                killer = asyncio.create_task(burst.kill(part * NUM_REQUESTS * NUM_OUTPUT // 7))
                assert await burst.answer(f"killed {part}") == expected
                await killer
        finally:
            await cluster.drain(0.0)

    asyncio.run(run())
