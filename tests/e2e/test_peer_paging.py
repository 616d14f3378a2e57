"""Engine processes that page sequences out to each other's memory: the same tokens, also when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from cloister.cluster import ReplicaSet
from cloister.launch.processes import make_engine
from cloister.launch.settings import resolve_settings
from cloister.types.events import Event, KVLoaded, Preempted
from cloister.types.request import Request, SamplingParams
from cloister.types.scope import LOCAL_SCOPE

NUM_REQUESTS = 8
NUM_OUTPUT = 80
WAIT_S = 120.0


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
