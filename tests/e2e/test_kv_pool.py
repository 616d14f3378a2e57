"""Replicas share KV in memory: with real models every bit is the same, and with real processes nothing outlives its engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloister.cluster import ReplicaSet
from cloister.engine.kv_pool import KVPool
from cloister.launch import build_engine, resolve_settings
from cloister.launch.processes import make_engine
from cloister.types.errors import PolicyError
from cloister.types.events import Event, KVLoaded, Scheduled
from cloister.types.request import Request, SamplingParams
from cloister.types.scope import LOCAL_SCOPE
from tests.e2e.test_kv_tiers import CASES, Runner, kv_mb, make_config, prompt
from tests.thinning import thin

NUM_ATTEMPTS = 5
WAIT_S = 300.0


@pytest.mark.parametrize("case", thin(CASES, ("windows", "states")))
def test_what_another_engine_has_computed_has_the_same_bits(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    config = make_config(tmp_path, *CASES[case])
    config = replace(config, kv_memory_mb=kv_mb(config) / 2)
    pool = KVPool(int(8 * 2**20 + 4 * 2**20 * kv_mb(config)), 2)
    first, second = Runner(build_engine(config)), Runner(build_engine(config))
    for engine in (first, second):
        engine.core.open_kv_tiers("shared:1M", (os.dup(pool.fd), pool.take_seat()))  # type: ignore[arg-type]
        engine.core._tiers.tiers.predict_s = lambda tier_bytes: 0.0  # type: ignore[union-attr,method-assign]
    try:
        second.answer("warm up", prompt(9))  # so that it knows what computing takes
        expected = first.answer("first", prompt(0))
        for number in range(1, 4):
            first.answer(f"other {number}", prompt(number))
        first.run_until(lambda: not first.core._tiers.tiers.indexes[0]._unwritten)  # type: ignore[union-attr]
        assert second.answer("again", prompt(0)) == expected
    finally:
        first.core._tiers.close()  # type: ignore[union-attr]
        second.core._tiers.close()  # type: ignore[union-attr]
    loaded = second.find(KVLoaded, "again")
    assert (loaded.tier, loaded.complete) == ("shared", True)
    size = len(prompt(0)) // config.block_size * config.block_size
    assert second.find(Scheduled, "again").num_cached_tokens == loaded.num_tokens == size


class Replicas:
    """Two engine processes with a pool, and what they said."""

    def __init__(self, cluster: ReplicaSet) -> None:
        self.cluster, self.events = cluster, list[Event]()
        cluster.subscribe(self.events.append)
        self.pool: KVPool = cluster._replicas[0]._transport._kv_pool  # type: ignore[attr-defined]

    async def answer(self, replica: int, name: str, token_ids: list[int]) -> tuple[list[int], int]:
        """Returns the tokens that a replica answers, and how many it had cached."""
        await self.cluster.drain_replica(1 - replica)
        try:
            sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            request = Request(request_id=name, token_ids=token_ids, sampling=sampling, timeout_s=WAIT_S)
            answer = [token_id async for output in self.cluster.generate(request) for token_id in output.token_ids]
        finally:
            self.cluster.return_replica(1 - replica)
        scheduled = next(e for e in self.events if isinstance(e, Scheduled) and e.request_id == name)
        return answer, scheduled.num_cached_tokens

    async def store(self, name: str, token_ids: list[int]) -> list[int]:
        """Has the first replica answer, and then evict what it computed."""
        answer, _ = await self.answer(0, name, token_ids)
        for number in range(3):
            await self.answer(0, f"{name}, other {number}", [token_id + number + 1 for token_id in token_ids])
        return answer

    async def find(self, name: str, seed: int) -> int:
        """Has the second replica answer what the first one has stored; returns the tokens that it had cached. On a busy machine
        it may not be stored yet."""
        for attempt in range(NUM_ATTEMPTS):
            text, token_ids = f"{name}, attempt {attempt}", make_prompt(seed + attempt)
            expected = await self.store(text, token_ids)
            answer, num_cached = await self.answer(1, f"{text} again", token_ids)
            assert answer == expected
            if num_cached:
                break
        return num_cached


def make_prompt(number: int) -> list[int]:
    return [(7 * i * i + 3 * i + 13 * number) % 2000 for i in range(800)]


@asynccontextmanager
async def replicas(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replicas]:
    monkeypatch.setattr("cloister.launch.processes.ENGINE_ENTRY", "tests.pool_member:build_loading_engine")
    flags: dict[str, Any] = {"replicas": 2, "num_threads": 1, "max_model_len": 900, "max_num_seqs": 1, "kv_memory_mb": 2.5}
    settings = resolve_settings(flags | {"kv_tier": "shared:48M"})
    cluster = make_engine(settings.engine.config, settings.server.config)
    assert isinstance(cluster, ReplicaSet)
    await cluster.start()
    try:
        yield Replicas(cluster)
    finally:
        await cluster.drain(0.0)


def test_a_conversation_goes_on_at_another_replica_until_its_scope_is_dropped_or_the_writer_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        async with replicas(monkeypatch) as found:
            await found.answer(1, "so that it knows what computing takes", make_prompt(50))
            assert await found.find("kept", 0) >= 784
            assert any(isinstance(event, KVLoaded) and event.tier == "shared" for event in found.events)
            dropped = make_prompt(100)
            expected = await found.store("dropped", dropped)
            await found.cluster.inspect_cache(LOCAL_SCOPE, drop=True)
            assert await found.answer(1, "dropped again", dropped) == (expected, 0)
            lost = make_prompt(200)
            expected = await found.store("lost", lost)
            client = found.cluster._replicas[0]
            assert client.pid is not None
            writers = [writer_of(found.pool, part) for part in range(2)]
            assert 0 not in writers
            os.kill(client.pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                while writer_of(found.pool, 0) in (0, writers[0]):  # until its successor has the part
                    await asyncio.sleep(0.01)
            assert await found.answer(1, "lost again", lost) == (expected, 0)

    asyncio.run(run())


def writer_of(pool: KVPool, part: int) -> int:
    return int.from_bytes(os.pread(pool.fd, 8, part * pool.part_bytes), "little")


@pytest.mark.parametrize("profile", ["open", "team", "private", "paranoid"])
def test_strict_profiles_refuse_a_shared_tier(profile: str) -> None:
    given = {"kv_tier": "shared:1G", "replicas": 2, "profile": profile, "prefix_cache": profile != "paranoid"}
    if profile in ("open", "team"):
        assert resolve_settings(given).engine.config.kv_tier == "shared:1G"
        return
    with pytest.raises(PolicyError, match=rf"T6\.offload\.shared-tier\.{profile}.*host:SIZE"):
        resolve_settings(given)
