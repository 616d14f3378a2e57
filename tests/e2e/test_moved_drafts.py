"""Requests with drafts and with stop strings move between real engine processes, and are answered as those that stay."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from benchmarks.migrations import Moves, answer_all, choose_stops, make_requests
from cloister.cluster import ReplicaSet
from cloister.engine import EngineClient, ProcessTransport
from cloister.types.config import EngineConfig
from cloister.types.events import Event, Stepped
from tests.cluster.test_replica_set import make_router
from tests.engine.forked_engines import spawn_forked

NUM_REQUESTS, NUM_MOVES = 9, 12


@pytest.mark.parametrize("drafter", ["ngram", "medusa"])
def test_answers_with_drafts_and_stop_strings_are_equal_whether_they_move_or_stay(drafter: str) -> None:
    config = EngineConfig(
        model="cloister-5m", num_threads=1, max_model_len=256, kv_memory_mb=16.0, speculate=drafter, draft_tokens=4
    )
    clients = [EngineClient(ProcessTransport("cloister.launch:build_engine", spawn=spawn_forked), config) for _ in range(2)]
    replicas = ReplicaSet(clients, partial(make_router, "least_load"))
    accepted: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, Stepped):
            accepted.extend(sum(each.accepted) for each in event.drafting)

    async def main() -> None:
        replicas.subscribe(note)
        await replicas.start()
        try:
            sizes = NUM_REQUESTS, 40, 90
            whole = make_requests(*sizes, "whole")
            await answer_all(replicas, whole, NUM_REQUESTS)
            stops = choose_stops(whole)
            stay, go = make_requests(*sizes, "stay", stops), make_requests(*sizes, "go", stops)
            await answer_all(replicas, stay, NUM_REQUESTS)
            accepted.clear()
            moves = Moves(replicas, go)
            await asyncio.gather(answer_all(replicas, go, NUM_REQUESTS), *(moves.move(NUM_MOVES, seed) for seed in range(3)))
        finally:
            await replicas.drain(0.0)
        for a, b in zip(stay, go, strict=True):
            assert b.result == a.result, b.request.request_id
        assert len(moves.done) >= 3
        assert sum(accepted) > 0
        assert sum(isinstance(one.stop_reason, str) for one in go) == len(stops) == NUM_REQUESTS // 3

    asyncio.run(asyncio.wait_for(main(), 240.0))
