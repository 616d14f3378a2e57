"""Running requests with drafts, stop strings and grammars move between engine processes, and their answers stay the same."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.migrations import Answer, answer_all, choose_stops, make_requests, running
from cloister.cluster import ReplicaSet
from cloister.types.events import Event, Migrated
from cloister.types.request import SequenceOutput
from tests.serving import MODEL
from tests.thinning import thin

SIZES = 12, 40, 160
"""Requests, and tokens of each prompt and answer."""
AT_ONCE = 6
AHEAD_CHARS = 60
"""A request with a stop string is to move at most so much text ahead of it, so that some have a part of it on each side; others
move within their first characters."""
FEWEST = {"stop string": 2, "grammar": 2, "neither": 2}
"""Moves of requests with each of these that there must be. A request may end before it has moved, so rounds are repeated."""
LONGEST_S = 240.0
OPTIONS = argparse.Namespace(model=MODEL, on="local", kv_transfer="shm")


def kind_of(answer: Answer) -> str:
    sampling = answer.request.sampling
    return "stop string" if sampling.stop else "neither" if sampling.grammar is None else "grammar"


async def answer_moving(cluster: ReplicaSet, answers: list[Answer], num_chars: list[int]) -> None:
    """Answers all requests, each of which is to change its replica once it has so much text."""
    moves = []

    def mover(one: Answer, least_chars: int) -> Callable[[SequenceOutput], None]:
        left = iter([one.request.request_id])

        def take(output: SequenceOutput) -> None:
            one.take(output)
            if len(one.text) >= least_chars and (name := next(left, None)) is not None and name in cluster._places:
                moves.append(asyncio.create_task(cluster.migrate(name, 1 - cluster._places[name])))

        return take

    free = asyncio.Semaphore(AT_ONCE)

    async def answer(one: Answer, least_chars: int) -> None:
        async with free:
            await cluster.follow(one.request, mover(one, least_chars))

    await asyncio.gather(*(answer(*pair) for pair in zip(answers, num_chars, strict=True)))
    await asyncio.gather(*moves)


async def compare(drafter: str) -> Counter[str]:
    """Compares the answers of requests that move with those of the same ones that stay; returns what was moved, and how many
    of them ended at their stop strings."""
    seen: Counter[str] = Counter()
    draw = random.Random(drafter)
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
            ahead = [draw.randrange(AHEAD_CHARS) for _ in go]
            num_chars = [
                len(one.text) - chars if one.request.sampling.stop else chars for one, chars in zip(stay, ahead, strict=True)
            ]
            await answer_moving(cluster, go, num_chars)
            assert [one.result for one in go] == [one.result for one in stay]
            seen["rounds"] += 1
        seen["ended at a stop string"] = sum(isinstance(one.stop_reason, str) for one in stay)
    return seen


@pytest.mark.parametrize("drafter", thin(["ngram", "draft_model", "medusa"], ["medusa"]))
def test_moved_requests_with_drafts_have_the_answers_of_those_that_stay(drafter: str) -> None:
    seen = asyncio.run(compare(drafter))
    assert seen["ended at a stop string"] >= 2
    assert seen["rounds"] >= 1
