"""Running requests with drafts, stop strings and grammars move between engine processes, and their answers stay the same."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter

import pytest

from benchmarks.migrations import Answer, answer_all, choose_stops, make_requests, running
from cloister.cluster import ReplicaSet
from cloister.types.events import Event, Migrated
from tests.serving import MODEL
from tests.thinning import thin

SIZES = 8, 40, 120
"""Requests, and tokens of each prompt and answer."""
AT_ONCE = 4
PAUSE_S = 0.002
FEWEST = {"stop string": 3, "grammar": 3, "neither": 3}
"""Moves of requests with each of these that there must be. On a busy machine a request may end before it has moved, so all are
asked again until there are as many."""
LONGEST_S = 600.0
OPTIONS = argparse.Namespace(model=MODEL, on="local", kv_transfer="shm")


def kind_of(answer: Answer) -> str:
    sampling = answer.request.sampling
    return "stop string" if sampling.stop else "neither" if sampling.grammar is None else "grammar"


async def answer_moving(cluster: ReplicaSet, answers: list[Answer]) -> None:
    """Answers all requests, which change their replicas again and again."""
    free = asyncio.Semaphore(AT_ONCE)

    async def move(one: Answer) -> None:
        name = one.request.request_id
        while one.finish_reason is None:
            place = cluster._moves.places.get(name)
            if not one.token_ids or place is None or not await cluster.migrate(name, 1 - place):
                await asyncio.sleep(PAUSE_S)

    async def answer(one: Answer) -> None:
        async with free:
            moving = asyncio.create_task(move(one))
            await cluster.follow(one.request, one.take)
            await moving

    await asyncio.gather(*(answer(one) for one in answers))


async def compare(drafter: str) -> Counter[str]:
    """Compares the answers of requests that move with those of the same ones that stay; returns what was moved, and how many
    of them ended at their stop strings."""
    seen: Counter[str] = Counter()
    async with running(OPTIONS, replicas=2, speculate=drafter, draft_tokens=4) as cluster, asyncio.timeout(LONGEST_S):
        whole = make_requests(*SIZES, "whole")
        await answer_all(cluster, whole, AT_ONCE)
        stops = choose_stops(whole)
        stay = make_requests(*SIZES, "stay", stops)
        await answer_all(cluster, stay, AT_ONCE)
        kinds = {one.request.request_id.removeprefix("stay"): kind_of(one) for one in stay}

        def note(event: Event) -> None:
            if isinstance(event, Migrated):
                seen[kinds[event.request_id.rpartition("-")[2]]] += 1

        cluster.subscribe(note)
        while any(seen[kind] < fewest for kind, fewest in FEWEST.items()):
            go = make_requests(*SIZES, f"go{seen['rounds']}-", stops)
            await answer_moving(cluster, go)
            assert [one.result for one in go] == [one.result for one in stay]
            seen["rounds"] += 1
        seen["ended at a stop string"] = sum(isinstance(one.stop_reason, str) for one in stay)
    return seen


@pytest.mark.parametrize("drafter", thin(["ngram", "draft_model", "medusa"], ["medusa"]))
def test_moved_requests_with_drafts_have_the_answers_of_those_that_stay(drafter: str) -> None:
    seen = asyncio.run(compare(drafter))
    assert seen["ended at a stop string"] >= 2
    assert seen["rounds"] >= 1
