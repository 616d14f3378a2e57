"""Hot prefixes are found by their keys, copied to replicas with less to do, and dropped together."""

from __future__ import annotations

import random

import pytest

from cloister.cluster import ROUTERS, ReplicaSnapshot
from cloister.cluster.hot_prefixes import MAX_KEYS, HotPrefixes, LeaseOrder, LeaseRenewal
from cloister.cluster.routers import RouterContext
from cloister.kv import PrefixKeys
from cloister.types.request import Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind

BLOCK = 16
ANN, BOB = (Scope(ScopeKind.TENANT, name) for name in (b"ann", b"bob"))
SYSTEM = list(range(100))
"""Six blocks and a bit."""


def keys() -> PrefixKeys:
    return PrefixKeys("model", BLOCK)


def controller(**settings: float) -> HotPrefixes:
    return HotPrefixes(keys(), random.Random(1), hot=6.0, cold=1.5, **settings)  # type: ignore[arg-type]


def ask(number: int, scope: Scope = ANN, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=4)
    return Request(
        **{"request_id": f"r{number}", "token_ids": [*SYSTEM, 1000 + number, 7], "sampling": sampling, "scope": scope, **fields}  # type: ignore[arg-type]
    )


def replicas(*num_requests: int, **fields: object) -> list[ReplicaSnapshot]:
    return [ReplicaSnapshot(index, num_requests=count, **fields) for index, count in enumerate(num_requests)]  # type: ignore[arg-type]


def heat(prefixes: HotPrefixes, count: int = 6, scope: Scope = ANN, index: int = 0, now: float = 0.0) -> None:
    for number in range(count):
        prefixes.note(ask(number, scope), index, now)


def begin(prefixes: HotPrefixes, *loads: int, now: float = 0.0) -> tuple[str, list[int]]:
    """Heats a prefix at replica 0 and has it copied wherever it is to be; returns the name of its lease, and the targets."""
    heat(prefixes, now=now)
    (own,) = prefixes.decide(replicas(*loads), now)
    assert isinstance(own, LeaseOrder)
    assert (own.index, own.source) == (0, None)
    name, targets = own.request.request_id, []
    prefixes.note_leased(name, 0, 96, now)
    while orders := prefixes.decide(replicas(*loads), now):
        (order,) = orders
        assert isinstance(order, LeaseOrder)
        assert (order.source, order.request) == (0, own.request)
        targets.append(order.index)
        assert prefixes.note_leased(name, order.index, 96, now) == []
    return name, targets


def test_what_many_requests_share_is_copied_to_every_replica_with_less_to_do() -> None:
    prefixes = controller()
    name, targets = begin(prefixes, 5, 0, 4, 3)
    assert targets == [1, 3]
    assert prefixes.request_of(name) is not None
    assert prefixes.request_of(name).token_ids == SYSTEM[:97]  # type: ignore[union-attr]


def test_a_few_requests_or_equal_loads_copy_nothing() -> None:
    prefixes = controller()
    heat(prefixes, 5)
    assert prefixes.decide(replicas(5, 0), 0.0) == []
    heat(prefixes, 5, now=60.0)
    assert prefixes.decide(replicas(5, 0), 60.0) == []
    heat(prefixes, 1, now=60.0)
    assert prefixes.decide(replicas(5, 4), 60.0) == []
    assert len(prefixes.decide(replicas(5, 3), 60.0)) == 1


def test_a_replica_that_has_computed_it_gets_no_copy() -> None:
    prefixes = controller()
    heat(prefixes)
    prefixes.note(ask(9), 1, 0.0)
    assert prefixes.decide(replicas(6, 1), 0.0) == []


@pytest.mark.parametrize("fields", [{"is_accepting": False}, {"is_idle": True}, {"is_slow": True}, {"role": "decode"}], ids=str)
def test_a_replica_that_computes_no_prompts_now_gets_no_copy(fields: dict[str, object]) -> None:
    prefixes = controller()
    heat(prefixes)
    assert prefixes.decide([ReplicaSnapshot(0, num_requests=6), ReplicaSnapshot(1, **fields)], 0.0) == []  # type: ignore[arg-type]


def test_scopes_are_never_counted_together_and_requests_of_their_own_not_at_all() -> None:
    prefixes = controller()
    heat(prefixes, 4)
    heat(prefixes, 4, BOB)
    heat(prefixes, 20, Scope(ScopeKind.REQUEST, b"once"))
    assert prefixes.decide(replicas(8, 0), 0.0) == []
    heat(prefixes, 2, BOB)
    (order,) = prefixes.decide(replicas(8, 0), 0.0)
    assert isinstance(order, LeaseOrder)
    assert order.request.scope == BOB


def test_leases_are_renewed_together_and_end_together_when_it_is_cold() -> None:
    prefixes = controller()
    name, targets = begin(prefixes, 5, 0, 0)
    everywhere = sorted([0, *targets])
    assert everywhere == [0, 1, 2]
    assert prefixes.decide(replicas(5, 0, 0), 2.9) == []
    assert prefixes.decide(replicas(5, 0, 0), 3.0) == [LeaseRenewal(index, name, 10.0) for index in everywhere]
    assert prefixes.decide(replicas(0, 0, 0), 21.0) == [LeaseRenewal(index, name, 0.0) for index in everywhere]
    assert not len(prefixes)


@pytest.mark.parametrize("loss", ["lease", "engine", "scope"])
def test_no_copy_outlives_what_it_is_a_copy_of(loss: str) -> None:
    prefixes = controller()
    name, _ = begin(prefixes, 5, 0, 0)
    if loss == "lease":
        actions = prefixes.note_leased(name, 0, 0, 1.0)
    else:
        actions = prefixes.lose(0) if loss == "engine" else prefixes.forget(ANN)
    assert [action for action in actions if action.index] == [LeaseRenewal(1, name, 0.0), LeaseRenewal(2, name, 0.0)]
    assert not len(prefixes)
    assert prefixes.note_leased(name, 1, 96, 1.0) == [LeaseRenewal(1, name, 0.0)]


def test_a_copy_that_failed_is_not_tried_again_for_a_while_and_others_stay() -> None:
    prefixes = controller()
    name, _ = begin(prefixes, 5, 0, 0)
    assert prefixes.note_leased(name, 2, 0, 1.0) == []
    assert prefixes.is_copy(name, 1)
    assert not prefixes.is_copy(name, 2)
    heat(prefixes, now=1.0)
    assert prefixes.decide(replicas(5, 0, 0), 1.0) == []
    heat(prefixes, now=11.0)
    assert [action.index for action in prefixes.decide(replicas(5, 0, 0), 11.0) if isinstance(action, LeaseOrder)] == [2]


def test_a_lease_is_no_longer_than_its_scope_keeps_what_nothing_asks_for() -> None:
    session = Scope(ScopeKind.SESSION, b"s", lifetime_s=4.0)
    prefixes = controller()
    heat(prefixes, 12, session)
    (order,) = prefixes.decide(replicas(6, 0), 0.0)
    assert isinstance(order, LeaseOrder)
    assert order.lease_s == 4.0
    assert prefixes.decide(replicas(6, 0), 3.0) == [LeaseRenewal(0, order.request.request_id, 1.0)]
    assert prefixes.decide(replicas(6, 0), 4.0) == [LeaseRenewal(0, order.request.request_id, 0.0)]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.cluster.hot_prefixes.MAX_KEYS", 12)
    monkeypatch.setattr("cloister.cluster.hot_prefixes.MAX_PREFIXES", 1)
    assert MAX_KEYS > 12
    prefixes = controller()
    for number in range(3):
        heat(prefixes, 6, Scope(ScopeKind.TENANT, b"%d" % number))
    assert len(prefixes._heat) == 12
    assert len(prefixes.decide(replicas(6, 0), 0.0)) == 1
    assert len(prefixes) == 1


@pytest.mark.parametrize("name", ["prefix_aware", "conductor"])
def test_a_router_counts_a_copy_as_a_hit(name: str) -> None:
    router = ROUTERS.get(name)(RouterContext(keys(), random.Random(1)))
    router.pick(ask(0), replicas(0, 9))
    assert router.count_cached(ask(1), 1) == 0
    request = Request(request_id="copy", token_ids=SYSTEM[:97], sampling=SamplingParams(max_tokens=1), scope=ANN)
    router.note_copy(request, ReplicaSnapshot(1))
    assert router.count_cached(ask(1), 1) == 96
