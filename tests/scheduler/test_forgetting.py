"""A scope is told what is kept of it, and drops it: on the device, in a tier, and while its requests run."""

from __future__ import annotations

import pytest

from cloister.types.events import KVLoaded
from cloister.types.scope import Scope, ScopeKind
from tests.scheduler.test_kv_restores import BLOCK, LAYOUTS, LOCAL, Engine, crowd_out, make_request, prompt

ANN, BOB = (Scope(ScopeKind.TENANT, name) for name in (b"ann", b"bob"))


def kept(engine: Engine, scope: Scope) -> dict[str, int]:
    """Returns how many blocks of a scope each place has."""
    return {place: sum(found.num_blocks) for place, found in engine.scheduler.report_kept(scope)}


@pytest.mark.parametrize("windows", LAYOUTS, ids=str)
def test_what_a_scope_drops_is_computed_again_and_another_scope_keeps_its_own(windows):
    engine = Engine(windows, num_blocks=60)
    engine.serve("ann", prompt(0), scope=ANN)
    engine.serve("with an adapter", prompt(0), scope=ANN, adapter="adapter")
    engine.serve("bob", prompt(0), scope=BOB)
    bobs = kept(engine, BOB)
    assert kept(engine, ANN)["device"] == 2 * bobs["device"] > 0
    engine.scheduler.forget(ANN, engine.now)
    engine.check()
    assert (kept(engine, ANN), kept(engine, BOB)) == ({"device": 0, "memory": 0}, bobs)
    for name, scope, adapter, num_cached in (("1", ANN, None, 0), ("2", ANN, "adapter", 0), ("3", BOB, None, 36)):
        engine.serve(name, prompt(0), scope=scope, adapter=adapter)
        assert engine.num_cached(name) == num_cached


def test_what_a_tier_has_of_a_scope_is_dropped_with_its_key():
    engine = Engine()
    engine.serve("ann", prompt(0), scope=ANN)
    crowd_out(engine)
    assert kept(engine, ANN) == {"device": 0, "memory": 11}
    engine.scheduler.forget(ANN, engine.now)
    root = engine.scheduler._requests.prefixes.chain_of(make_request("x", prompt(0), scope=ANN), prompt(0))[1]
    assert engine.tier.index.ended_roots == [root]
    assert kept(engine, ANN) == {"device": 0, "memory": 0}
    engine.serve("again", prompt(0), scope=ANN)
    assert engine.num_cached("again") == 0
    assert not engine.find(KVLoaded)


def test_a_request_that_runs_keeps_its_blocks_which_become_free_when_it_ends():
    engine = Engine(num_blocks=60)
    engine.serve("first", prompt(0), scope=ANN)
    expected = engine.serve("alone", prompt(0), scope=BOB)
    engine.scheduler.add(make_request("runs", prompt(0), scope=ANN), engine.now)
    engine.step()
    assert engine.num_cached("runs") == 36
    num_free = engine.pool.num_free
    engine.scheduler.forget(ANN, engine.now)
    engine.check()
    assert engine.pool.num_used >= 9
    engine.run()
    assert engine.answers["runs"] == expected
    assert kept(engine, ANN) == {"device": 0, "memory": 0}
    assert engine.pool.num_free > num_free
    assert engine.pool.num_used == 0


def test_a_load_of_what_is_dropped_ends_and_its_request_computes_it():
    engine = Engine()
    expected = engine.serve("first", prompt(0), scope=ANN)
    crowd_out(engine)
    engine.can_read = False
    engine.scheduler.add(make_request("loads", prompt(0), scope=ANN), engine.now)
    engine.step()
    assert engine.tier.reads
    engine.scheduler.forget(ANN, engine.now)
    engine.can_read = True
    engine.run()
    assert engine.answers["loads"] == expected
    assert engine.num_cached("loads") == 0
    assert not engine.find(KVLoaded, "loads")[0].complete
    assert kept(engine, ANN) == {"device": 0, "memory": 0}


def test_ages_are_of_the_oldest_block_and_of_the_last_use():
    engine = Engine(num_blocks=60)

    def times() -> tuple[float | None, float | None]:
        _, found = engine.scheduler.report_kept(LOCAL)[0]
        return found.oldest_s, found.used_s

    assert times() == (None, None)
    for engine.now, name, number in ((1.0, "first", 0), (5.0, "other", 1), (9.0, "again", 0)):
        engine.serve(name, prompt(number, 4 * BLOCK))
        assert times() == (1.0, engine.now)
    engine.now = 20.0
    engine.serve("another scope's", prompt(0), scope=ANN)
    assert times() == (1.0, 9.0)
