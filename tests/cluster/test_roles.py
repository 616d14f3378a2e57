"""Roles of replicas: where prompts and answers are computed, and when a replica changes its role."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from cloister.cluster import ROUTERS, ReplicaSnapshot
from cloister.cluster.roles import Flip, RoleFlipper, RoleRouter, RoutingDecision, assign_roles
from cloister.cluster.routers import RouterContext
from cloister.kv import PrefixKeys
from cloister.types.errors import ConfigError
from cloister.types.request import BeamSearch, PoolingParams, Request, SamplingParams

BLOCK_SIZE = 16
COST = (0.01, 0.001, 0.0, 0.0)


def role_router(name: str = "least_load") -> RoleRouter:
    def make() -> Any:
        return ROUTERS.get(name)(RouterContext(PrefixKeys("fp", BLOCK_SIZE), random.Random(0)))

    return RoleRouter(make(), make(), BLOCK_SIZE)


def ask(num_tokens: int = 100, **changes: Any) -> Request:
    return Request(request_id="r", token_ids=list(range(num_tokens)), sampling=SamplingParams(**changes))


def pools(**changes: Any) -> list[ReplicaSnapshot]:
    return [
        ReplicaSnapshot(0, role="prefill", **changes),
        ReplicaSnapshot(1, role="decode", **changes),
        ReplicaSnapshot(2, role="decode", **changes),
    ]


def test_a_prompt_is_computed_where_prompts_are_and_the_answer_goes_on_elsewhere() -> None:
    router = role_router()
    assert router.place(ask(), pools()) == RoutingDecision(0, hands_off=True)
    assert router.place_decode(ask(), pools()) in (1, 2)


def test_a_mixed_replica_keeps_its_answers() -> None:
    assert role_router().place(ask(), [ReplicaSnapshot(0, role="mixed")]) == RoutingDecision(0)


def test_a_prompt_without_a_whole_block_has_nothing_to_hand_over() -> None:
    placement = role_router().place(ask(BLOCK_SIZE - 1), pools())
    assert placement.index in (1, 2)
    assert not placement.hands_off


def test_beams_stay_together_and_embeddings_have_no_answer() -> None:
    assert role_router().place(ask(beams=BeamSearch(width=2)), pools()).index in (1, 2)
    embedding = msgspec.structs.replace(ask(), pooling=PoolingParams())
    assert role_router().place(embedding, pools()) == RoutingDecision(0, hands_off=False)


def test_without_a_replica_for_prompts_another_one_computes_the_request() -> None:
    assert role_router().place(ask(), pools()[1:]).index in (1, 2)
    assert role_router().place_decode(ask(), pools()[:1]) is None


def test_a_prompt_that_is_computed_sooner_than_its_kv_would_move_is_not_handed_over() -> None:
    fast_network, slow_network = (pools(cost=COST, transfer_token_s=each_s, num_requests=3) for each_s in (1e-5, 0.1))
    assert role_router().place(ask(), fast_network).hands_off
    assert not role_router().place(ask(), slow_network).hands_off
    assert role_router("capacity_random").place(ask(), slow_network).hands_off  # it may not look


def test_a_long_hit_of_a_decoder_is_used_there() -> None:
    replicas = pools(cost=COST, transfer_token_s=5e-4, num_requests=3)
    assert role_router("prefix_aware").place(ask(160), replicas).hands_off
    router = role_router("prefix_aware")
    router._prefill.pick(ask(160), replicas[1:2])
    assert router.place(ask(160), replicas) == RoutingDecision(1)


@pytest.mark.parametrize("name", ["round_robin", "least_load", "prefix_aware", "conductor"])
def test_no_decoder_starves_while_another_one_gets_everything(name: str) -> None:
    router, counts = role_router(name), Counter[int]()
    for number in range(40):
        replicas = pools()
        loaded = [replicas[0], *(dataclasses.replace(r, num_requests=counts[r.index]) for r in replicas[1:])]
        router.place(ask(100 + number), loaded)
        target = router.place_decode(ask(100 + number), loaded)
        assert target is not None
        counts[target] += 1
    assert abs(counts[1] - counts[2]) <= 2


@pytest.mark.parametrize(
    ("counts", "text"), [((2, 1, 2), "more than the 2 replicas"), ((2, 2, 0), "to decode"), ((2, 0, 2), "to prefill")]
)
def test_roles_that_leave_something_undone_are_an_error(counts: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        assign_roles(*counts)


def test_the_rest_of_the_replicas_is_mixed() -> None:
    assert assign_roles(4, 1, 2) == ["prefill", "decode", "decode", "mixed"]


def starving(num_queued: int = 3) -> list[ReplicaSnapshot]:
    queued = ReplicaSnapshot(0, role="prefill", num_requests=9, num_queued=num_queued)
    return [queued, ReplicaSnapshot(1, role="decode", num_requests=1), ReplicaSnapshot(2, role="decode")]


def test_an_idle_replica_flips_to_where_others_queue_once_that_lasts() -> None:
    flips = RoleFlipper(random.Random(0), hold_s=2.0, rest_s=20.0)
    assert [flips.decide(starving(), now) for now in (0.0, 1.0, 1.9)] == [None, None, None]
    first = flips.decide(starving(), 2.0)
    assert first in (Flip(1, "prefill"), Flip(2, "prefill"))
    assert flips.decide(starving(), 10.0) is None
    assert flips.decide(starving(), 22.1) is not None


def test_who_flips_is_drawn_by_capacity_among_the_idle_ones() -> None:
    queued, first, second = starving()
    busy = ReplicaSnapshot(3, role="decode", num_requests=5, capacity=100.0)
    pool = [queued, first, dataclasses.replace(second, capacity=3.0), busy]
    draw = random.Random(1)
    flips = Counter(flip.index for _ in range(400) if (flip := RoleFlipper(draw, hold_s=0.0).decide(pool, 0.0)) is not None)
    assert set(flips) == {1, 2}
    assert 2.2 < flips[2] / flips[1] < 4.0


def test_a_queue_that_comes_and_goes_flips_nothing() -> None:
    flips = RoleFlipper(random.Random(0), hold_s=2.0)
    assert [flips.decide(starving(int(now) % 2), now) for now in map(float, range(20))] == [None] * 20


def test_the_last_replica_of_a_role_keeps_it() -> None:
    flips = RoleFlipper(random.Random(0), hold_s=0.0)
    assert flips.decide(starving()[:2], 0.0) is None
