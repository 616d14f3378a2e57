"""Routers choose among replicas that accept requests; the failures that the field knows are cases here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cluster import ROUTERS, ReplicaSnapshot
from cloister.cluster.replica_states import ReplicaStates
from cloister.cluster.request_routing import RequestRouting
from cloister.cluster.routers import Router, RouterContext
from cloister.kv import PrefixKeys
from cloister.types.errors import ConfigError, QueueFullError
from cloister.types.request import BeamSearch, Request, SamplingParams
from cloister.types.scope import LOCAL_SCOPE, Scope, ScopeKind
from tests.engine.fake_transport import MODEL

BLOCK_SIZE = 16


def make(name: str, seed: int = 0) -> Router:
    return ROUTERS.get(name)(RouterContext(PrefixKeys("fp", BLOCK_SIZE), random.Random(seed)))


def ask(token_ids: Sequence[int], scope: Scope = LOCAL_SCOPE) -> Request:
    return Request(request_id="r", token_ids=list(token_ids), sampling=SamplingParams(), scope=scope)


def idle(num_replicas: int) -> list[ReplicaSnapshot]:
    return [ReplicaSnapshot(index) for index in range(num_replicas)]


def busy(*num_requests: int) -> list[ReplicaSnapshot]:
    return [ReplicaSnapshot(index, num_requests=number) for index, number in enumerate(num_requests)]


@given(
    name=st.sampled_from(ROUTERS.names()),
    places=st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=20),
    prompts=st.lists(st.integers(0, 3), min_size=20, max_size=20),
)
def test_a_router_picks_one_that_accepts(name: str, places: list[set[int]], prompts: list[int]) -> None:
    router = make(name)
    for number, accepting in enumerate(places):
        replicas = [ReplicaSnapshot(index, num_requests=index) for index in sorted(accepting)]
        assert router.pick(ask([prompts[number]] * 40), replicas) in accepting


def test_replicas_take_turns() -> None:
    router = make("round_robin")
    assert [router.pick(ask([1]), idle(3)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_turns_skip_a_replica_that_is_away() -> None:
    router = make("round_robin")
    replicas = idle(3)
    assert [router.pick(ask([1]), [replicas[0], replicas[2]]) for _ in range(4)] == [0, 2, 0, 2]


def test_the_shortest_queue_is_joined() -> None:
    assert make("least_load").pick(ask([1]), busy(3, 1, 2)) == 1


def test_of_equal_queues_the_one_with_fewer_prompt_tokens_is_joined() -> None:
    replicas = [
        ReplicaSnapshot(0, num_requests=2, num_pending_tokens=900),
        ReplicaSnapshot(1, num_requests=2, num_pending_tokens=9),
    ]
    assert make("least_load").pick(ask([1]), replicas) == 1


def test_a_replica_of_twice_the_capacity_counts_for_two() -> None:
    replicas = [ReplicaSnapshot(0, num_requests=3, capacity=1.0), ReplicaSnapshot(1, num_requests=5, capacity=2.0)]
    assert make("least_load").pick(ask([1]), replicas) == 1


def test_a_draw_follows_capacity_alone() -> None:
    router = make("capacity_random", seed=1)
    replicas = [ReplicaSnapshot(0, num_requests=500, capacity=3.0), ReplicaSnapshot(1, capacity=1.0)]
    counts = Counter(router.pick(ask([number % 7] * 50), replicas) for number in range(8000))
    assert counts[0] / 8000 == pytest.approx(0.75, abs=0.02)


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    router = make("prefix_aware")
    documents = [[number] * 100 for number in range(3)]
    homes = [
        router.pick(ask(document), busy(*[int(i != number) for i in range(3)])) for number, document in enumerate(documents)
    ]
    assert homes == [0, 1, 2]
    assert [router.pick(ask([*document, 7, 8, 9]), idle(3)) for document in documents] == homes


def test_two_scopes_never_share_a_place() -> None:
    router = make("prefix_aware")
    one, other = (Scope(ScopeKind.TENANT, salt) for salt in (b"a", b"b"))
    assert router.pick(ask([1] * 100, one), busy(1, 0)) == 1
    assert router.count_cached(ask([1] * 100, other), 1) == 0
    assert router.pick(ask([1] * 100, other), busy(0, 1)) == 0
    assert router.pick(ask([1] * 100, one), idle(2)) == 1


def test_a_scope_of_one_request_leaves_no_trace_in_the_router() -> None:
    router = make("prefix_aware")
    scope = Scope(ScopeKind.REQUEST, b"x")
    assert router.pick(ask([1] * 100, scope), busy(1, 0)) == 1
    assert router.pick(ask([1] * 100, scope), busy(0, 1)) == 0
    assert router.count_cached(ask([1] * 100, scope), 1) == 0


def test_a_system_prompt_that_everybody_shares_does_not_heat_one_replica() -> None:
    router = make("prefix_aware")
    num_requests = [0, 0, 0, 0]
    for number in range(400):
        num_requests[router.pick(ask([5] * 320 + [number] * 8), busy(*num_requests))] += 1
    assert max(num_requests) <= 2 * min(num_requests) + 5


@pytest.mark.parametrize("name", ["least_load", "least_work", "prefix_aware", "conductor"])
@pytest.mark.parametrize("scope", [LOCAL_SCOPE, Scope(ScopeKind.REQUEST, b"x")], ids=["cached", "without a trace"])
def test_one_of_equal_replicas_is_drawn_and_the_seed_decides(name: str, scope: Scope) -> None:
    def pick_all(seed: int) -> list[int]:
        router = make(name, seed)
        return [router.pick(ask([number] * 40, scope), idle(3)) for number in range(60)]

    assert pick_all(1) == pick_all(1) != pick_all(2)
    assert min(Counter(pick_all(1)).values()) >= 10


def test_a_short_shared_beginning_does_not_decide() -> None:
    router = make("prefix_aware")
    assert router.pick(ask([5] * 32 + [1] * 200), busy(0, 1)) == 0
    replicas = [ReplicaSnapshot(0, num_pending_tokens=500, num_requests=1), ReplicaSnapshot(1)]
    assert router.pick(ask([5] * 32 + [2] * 200), replicas) == 1


def keyed(number: int, key: bytes) -> Request:
    """Returns a request whose prompt no other one has."""
    return msgspec.structs.replace(ask([number] * 100), cache_key=key)


def test_requests_with_one_prompt_cache_key_go_to_one_replica_until_it_is_too_busy() -> None:
    router = make("prefix_aware")
    assert router.pick(keyed(0, b"key"), busy(1, 1, 0)) == 2
    assert {router.pick(keyed(number, b"key"), busy(0, 0, 3)) for number in range(1, 9)} == {2}
    assert router.pick(keyed(9, b"other"), busy(0, 1, 3)) == 0
    assert router.pick(keyed(10, b"key"), busy(1, 0, 9)) == 1  # and it stays there
    assert router.pick(keyed(11, b"key"), idle(3)) == 1


def test_a_prompt_that_is_cached_goes_there_whatever_its_prompt_cache_key() -> None:
    router = make("prefix_aware")
    assert router.pick(keyed(0, b"key"), busy(0, 1)) == 0
    assert router.pick(keyed(1, b"other"), busy(1, 0)) == 1
    assert router.pick(keyed(1, b"key"), idle(2)) == 1


def test_a_prompt_cache_key_is_forgotten_with_its_replica_and_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.cluster.routers.prefix_aware.MAX_CACHE_KEYS", 2)
    router = make("prefix_aware")
    for number, key in enumerate((b"a", b"b", b"c")):
        assert router.pick(keyed(number, key), busy(0, 1)) == 0
    assert list(router._last_of) == [b"b", b"c"]  # type: ignore[attr-defined]
    router.forget(0)
    assert router.pick(keyed(9, b"c"), busy(1, 0)) == 1


def test_a_replica_that_was_restarted_has_an_empty_cache() -> None:
    router = make("prefix_aware")
    assert router.pick(ask([1] * 100), busy(1, 0)) == 1
    assert router.count_cached(ask([1] * 100), 1)
    router.forget(1)
    assert router.count_cached(ask([1] * 100), 1) == 0


def test_no_more_keys_are_kept_than_a_replica_has_blocks() -> None:
    router = make("prefix_aware")
    small = [ReplicaSnapshot(0, num_total_blocks=10)]
    for number in range(100):
        router.pick(ask([number] * 100), small)
    [cached] = router._prompts._cached.values()  # type: ignore[attr-defined]
    assert len(cached._keys) == 10
    assert router.pick(ask([0] * 100), [*small, ReplicaSnapshot(1)]) == 0
    assert cached.match([]) == 0


COST = (0.01, 0.001, 0.0, 0.0)


def conduct(max_ttft_s: float | None = None, seed: int = 0) -> Router:
    return ROUTERS.get("conductor")(RouterContext(PrefixKeys("fp", BLOCK_SIZE), random.Random(seed), max_ttft_s))


def test_a_prompt_goes_where_its_first_token_comes_soonest() -> None:
    router = conduct()
    assert router.pick(ask([1] * 160), [ReplicaSnapshot(0, cost=COST)]) == 0  # now cached there
    near = [ReplicaSnapshot(0, cost=COST, num_pending_tokens=100), ReplicaSnapshot(1, cost=COST)]
    assert router.pick(ask([1] * 160), near) == 0  # 100 tokens of others, and 16 of this one
    far = [ReplicaSnapshot(0, cost=COST, num_pending_tokens=400), ReplicaSnapshot(1, cost=COST)]
    assert router.pick(ask([1] * 160), far) == 1


def test_a_hit_of_a_busy_replica_is_copied_if_that_is_sooner_than_computing_it() -> None:
    for transfer_token_s, source in ((1e-4, 0), (1e-2, None), (0.0, None)):
        router = conduct()
        router.pick(ask([1] * 160), [ReplicaSnapshot(0, cost=COST)])
        router.take_source()
        replicas = [
            ReplicaSnapshot(0, cost=COST, num_pending_tokens=400),
            ReplicaSnapshot(1, cost=COST, transfer_token_s=transfer_token_s),
        ]
        assert router.pick(ask([1] * 160), replicas) == 1
        assert router.take_source() == source
        assert router.take_source() is None


def test_a_request_that_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    replicas = [ReplicaSnapshot(0, cost=COST, num_pending_tokens=8_000)]
    with pytest.raises(QueueFullError, match=r"first token would come in 8\.1 s, after 2\.0 s") as refusal:
        conduct(max_ttft_s=2.0).admit(ask([1] * 100), replicas)
    assert refusal.value.retry_after_s == pytest.approx(6.12)
    conduct(max_ttft_s=9.0).admit(ask([1] * 100), replicas)


def test_a_prompt_is_not_computed_if_no_decoder_will_have_room_for_its_answer() -> None:
    prefill = ReplicaSnapshot(0, role="prefill", num_pending_tokens=1_000)
    for num_used, is_refused in ((40, True), (10, False)):
        decode = ReplicaSnapshot(1, role="decode", num_used_blocks=num_used, num_total_blocks=100)
        with pytest.raises(QueueFullError) if is_refused else nullcontext():
            conduct().admit(ask([1] * 100), [prefill, decode])


def test_answers_go_to_the_decoder_with_the_shortest_steps_and_room() -> None:
    full = ReplicaSnapshot(0, role="decode", cost=COST, num_used_blocks=99, num_total_blocks=100)
    busy, idle_one = (ReplicaSnapshot(i, role="decode", cost=COST, num_requests=n) for i, n in ((1, 8), (2, 2)))
    assert conduct().pick_decoder(ask([1] * 100), [full, busy, idle_one]) == 2
    assert conduct().pick_decoder(ask([1] * 100), [full, busy]) == 1


@pytest.mark.parametrize("name", ["least_load", "conductor"])
def test_many_routers_that_see_the_same_do_not_all_choose_the_same_replica(name: str) -> None:
    counts = Counter(make(name, seed).pick(ask([1] * 40), idle(4)) for seed in range(200))
    assert min(counts[index] for index in range(4)) > 25


def test_what_a_restarted_replica_had_cached_attracts_nothing() -> None:
    router = conduct()
    router.pick(ask([1] * 160), [ReplicaSnapshot(0, cost=COST)])
    router.forget(0)
    assert router.count_cached(ask([1] * 160), 0) == 0
    assert {router.pick(ask([number] * 160), [ReplicaSnapshot(i, cost=COST) for i in range(2)]) for number in range(20)} == {
        0,
        1,
    }


def test_an_unknown_router_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match="capacity_random, conductor, least_load, least_work, prefix_aware, round_robin"):
        ROUTERS.get("lpm")


class HeldSearches:
    """Two replicas: beam searches wait for their share at the first, and the second has a few requests."""

    unavailable: frozenset[int] = frozenset()

    clients = (SimpleNamespace(has_room_for=lambda tenant: True),) * 2

    def candidates(self, found: object = None, excluding: object = None) -> list[ReplicaSnapshot]:
        searches = ReplicaSnapshot(0, num_requests=9, num_waiting=8, num_pending_tokens=800, num_held=8, num_held_tokens=800)
        return [searches, ReplicaSnapshot(1, num_requests=4, num_pending_tokens=40)]


@pytest.mark.parametrize("name", ["least_load", "prefix_aware", "conductor"])
def test_searches_that_wait_for_their_share_keep_away_other_searches_only(name: str) -> None:
    routing = RequestRouting(cast(ReplicaStates, HeldSearches()), lambda model: make(name), BLOCK_SIZE)
    routing.connect(MODEL)
    search = msgspec.structs.replace(ask([2] * 40), sampling=SamplingParams(beams=BeamSearch(width=4)))
    assert [routing.place(request).index for request in (ask([1] * 40), search)] == [0, 1]
    replicas = HeldSearches().candidates()
    assert [routing.place_decode(request, replicas) for request in (ask([1] * 40), search)] == [0, 1]
