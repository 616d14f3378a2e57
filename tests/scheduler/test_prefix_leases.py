"""Copies of a prefix live as long as their lease, in their scope, within a share of the memory and outside every quota."""

from __future__ import annotations

import pytest

from cloister.scheduler.prefix_leases import PREFIX_SHARE
from cloister.types.events import PrefixLeased, Scheduled
from cloister.types.scope import Scope, ScopeKind
from tests.checked_runner import STATE
from tests.scheduler.test_kv_loads import BLOCK, LAYOUTS, PROMPT, Engine, alone, carry, make_request

ANN, BOB = (Scope(ScopeKind.TENANT, name) for name in (b"ann", b"bob"))
PREFIX = PROMPT[:33]
NUM_BLOCKS = 120
NAME = "hot-prefix-1"


def engine(windows=(None,), **shape) -> Engine:
    return Engine(windows, **{"num_blocks": NUM_BLOCKS, **shape})


def lease(target: Engine, *, is_copy: bool, scope=ANN, name: str = NAME, lease_s: float = 10.0, token_ids=PREFIX) -> None:
    request = make_request(name, token_ids, scope=scope)
    target.scheduler.prefix_leases.lease(request, lease_s, target.now, is_copy=is_copy)


def copied(windows=(None,), **shape) -> tuple[Engine, Engine]:
    """Returns an engine that has computed a prefix, and one that has copied it."""
    source, target = engine(windows), engine(windows, **shape)
    source.serve(make_request("first", PREFIX, scope=ANN))
    lease(target, is_copy=True)
    carry(source, target)
    target.run()
    return source, target


def num_hit(target: Engine, name: str, scope: Scope) -> int:
    target.events.clear()
    target.serve(make_request(name, scope=scope))
    return target.find(Scheduled)[0].num_cached_tokens


def check_gone(target: Engine) -> None:
    target.check()
    target.scheduler.prefix_leases.check()
    assert not target.scheduler.prefix_cache.copied_keys
    assert not len(target.scheduler.prefix_leases)
    assert target.pool.num_used == 0


@pytest.mark.parametrize("windows", [each for each in LAYOUTS if STATE not in each], ids=str)
def test_a_copy_is_a_hit_in_its_scope_only_and_gives_the_same_answer(windows):
    _, target = copied(windows)
    assert target.scheduler.prefix_leases.take_news() == [PrefixLeased(NAME, 32)]
    assert num_hit(target, "bob", BOB) == 0
    assert num_hit(target, "ann", ANN) == 32
    assert target.answer() == alone(windows, make_request(scope=ANN))


@pytest.mark.parametrize("end", ["time", "front", "scope", "pressure"])
def test_a_copy_and_what_continues_it_go_with_its_lease(end):
    _, target = copied()
    assert num_hit(target, "ann", ANN) == 32
    leases = target.scheduler.prefix_leases
    leases.take_news()
    num_cached = target.pool.num_cached
    assert num_cached, "the answer that continues the copy is cached"
    if end == "time":
        target.now = 10.0
    elif end == "front":
        leases.renew(NAME, 0.0, target.now)
    elif end == "scope":
        target.scheduler.forget(ANN, target.now)
    else:
        assert target.scheduler.kv_loads.reclaim_one(target.now)
    target.run()
    check_gone(target)
    assert target.pool.num_cached == 0
    assert leases.take_news() == ([] if end == "front" else [PrefixLeased(NAME, 0)])
    assert num_hit(target, "again", ANN) == 0


def test_a_renewed_lease_lasts_from_then_on_and_an_unknown_one_is_named():
    _, target = copied()
    leases = target.scheduler.prefix_leases
    leases.take_news()
    target.now = 9.0
    leases.renew(NAME, 10.0, target.now)
    leases.renew("hot-prefix-2", 10.0, target.now)
    leases.renew("hot-prefix-2", 0.0, target.now)
    assert leases.take_news() == [PrefixLeased("hot-prefix-2", 0)]
    for now, is_there in ((18.9, True), (19.0, False)):
        target.now = now
        target.run()
        assert bool(target.scheduler.prefix_cache.copied_keys) is is_there


def test_a_request_that_runs_on_a_copy_keeps_its_blocks_and_they_become_free_behind_it():
    _, target = copied()
    target.scheduler.add(make_request("ann", scope=ANN), target.now)
    target.step()
    assert target.find(Scheduled)[-1].num_cached_tokens == 32
    target.scheduler.prefix_leases.renew(NAME, 0.0, target.now)
    target.check()
    assert not target.scheduler.prefix_cache.copied_keys
    target.run()
    assert target.answer() == alone((None,), make_request(scope=ANN))
    assert target.pool.num_used == 0


def test_a_copy_counts_against_no_quota_and_what_its_scope_adds_does():
    _, target = copied(scopes=2)
    quotas = target.scheduler.prefix_cache._quotas[0]
    assert not quotas.keeps_any(ANN.seed)
    assert target.pool.count_available(0) == NUM_BLOCKS - 8
    assert num_hit(target, "ann", ANN) == 32
    assert quotas._counts[ANN.seed] == (len(PROMPT) + 5) // BLOCK - 8
    target.scheduler.prefix_leases.renew(NAME, 0.0, target.now)
    assert not quotas.keeps_any(ANN.seed)
    check_gone(target)


def test_leases_of_prefixes_hold_an_eighth_of_the_memory_at_most():
    target = engine()
    most = int(PREFIX_SHARE * NUM_BLOCKS) * BLOCK
    for number, length in enumerate((most, BLOCK)):
        target.serve(make_request(f"r{number}", [1000 * number + i for i in range(length + 1)], scope=ANN, max_tokens=1))
        lease(target, is_copy=False, name=f"n{number}", token_ids=[1000 * number + i for i in range(length + 1)])
    assert target.scheduler.prefix_leases.take_news() == [PrefixLeased("n0", most), PrefixLeased("n1", 0)]


def test_what_is_not_there_is_not_leased_and_what_arrives_in_part_is_no_copy():
    target = engine()
    lease(target, is_copy=False)
    source = engine()
    source.serve(make_request("first", PREFIX, scope=ANN))
    lease(target, is_copy=True)
    carry(source, target, most=4)
    target.run()
    assert target.scheduler.prefix_leases.take_news() == [PrefixLeased(NAME, 0)] * 2
    check_gone(target)


@pytest.mark.parametrize("end", ["front", "scope"])
def test_a_copy_that_is_not_wanted_any_more_is_not_kept_when_it_arrives(end):
    source, target = engine(), engine()
    source.serve(make_request("first", PREFIX, scope=ANN))

    def stop() -> None:
        if end == "front":
            target.scheduler.prefix_leases.renew(NAME, 0.0, target.now)
        else:
            target.scheduler.forget(ANN, target.now)

    lease(target, is_copy=True)
    carry(source, target, between=stop)
    target.run()
    check_gone(target)


def test_a_shorter_copy_stays_when_a_longer_one_ends():
    source, target = copied(num_blocks=200)
    source.serve(make_request("second", [*PROMPT, 1], scope=ANN))
    lease(target, is_copy=True, name="longer", token_ids=[*PROMPT, 1])
    assert [query.num_known for query in target.scheduler.kv_loads.queries] == [8]
    carry(source, target)
    target.run()
    assert len(target.scheduler.prefix_cache.copied_keys) == 9
    target.scheduler.prefix_leases.renew("longer", 0.0, target.now)
    target.run()
    assert len(target.scheduler.prefix_cache.copied_keys) == 8
    target.scheduler.prefix_leases.check()
    assert num_hit(target, "ann", ANN) == 32


def test_the_owner_says_when_it_has_dropped_what_others_copy():
    source = engine()
    source.serve(make_request("first", PREFIX, scope=ANN))
    lease(source, is_copy=False)
    assert source.scheduler.prefix_leases.take_news() == [PrefixLeased(NAME, 32)]
    source.scheduler.forget(ANN, source.now)
    assert source.scheduler.prefix_leases.take_news() == [PrefixLeased(NAME, 0)]
    check_gone(source)
