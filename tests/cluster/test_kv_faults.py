"""The search for faults finds bugs that are planted where KV moves between engines."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cloister.cluster.virtual import fuzz
from cloister.kv import KVObject, KVSealer, Leases
from cloister.kv.leases import _Lease
from cloister.scheduler.kv_exports import KVExports
from cloister.scheduler.kv_loads import KVLoad, KVLoads

MOST_SCENARIOS = 40
take = Leases.take


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """The engines' deaths are the purpose, and no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def believe_anything(sealer: KVSealer, found: KVObject, root: bytes, keys: list[bytes]) -> bool:
    return True


def lease_nothing_to_exports(
    leases: Leases, name: str, keys: Sequence[bytes], until_s: float, *, of_one_request: bool = False
) -> list[int]:
    """Blocks that are being copied may be evicted and written."""
    if not name.startswith("export"):
        return take(leases, name, keys, until_s, of_one_request=of_one_request)
    leases.by_name[name] = _Lease(until_s)
    return leases._cache.match(keys)


def forget_blocks(leases: Leases, name: str) -> None:
    leases.by_name.pop(name, None)


def keep_blocks(loads: KVLoads, load: KVLoad) -> None:
    pass


def close_nothing(exports: KVExports, number: int, *, is_complete: bool) -> None:
    pass


PLANTED: dict[str, tuple[Any, str, Any, int]] = {  # and the seed to begin with
    "KV that nobody has authenticated is accepted": (KVSealer, "is_genuine", believe_anything, 80),
    "a block is free while it is copied": (Leases, "take", lease_nothing_to_exports, 500),
    "a lease ends and its blocks stay": (Leases, "drop", forget_blocks, 0),
    "a load ends and its blocks stay": (KVLoads, "_release", keep_blocks, 0),
    "an export never ends": (KVExports, "close", close_nothing, 0),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, first = PLANTED[bug]
    monkeypatch.setattr(where, name, wrong)
    scenarios = [scenario for seed in range(first, first + 150) if (scenario := fuzz.scenario_of(seed)).moves_kv]
    assert any(fuzz.replay(scenario).violations for scenario in scenarios[:MOST_SCENARIOS])


def test_kv_moves_in_the_scenarios() -> None:
    """So what the search finds, or does not find, is of some worth."""
    arrived = 0
    insert = KVLoads.arrive

    def count(loads: KVLoads, request_id: str, objects: list[KVObject]) -> None:
        nonlocal arrived
        arrived += len(objects)
        insert(loads, request_id, objects)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVLoads, "arrive", count)
        for seed in range(60):
            if (scenario := fuzz.scenario_of(seed)).moves_kv:
                assert not fuzz.replay(scenario).violations
    assert arrived >= 10
