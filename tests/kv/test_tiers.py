"""Shares of a tier: what one owner stores lets nothing of another one go."""

from __future__ import annotations

import pytest

from cloister.kv.pool import BlockGroup
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierLayout
from cloister.kv.tiers import KVTiers
from cloister.types.errors import ConfigError

NUM_SLOTS, NUM_SHARES = 13, 4


def key_of(owner: bytes, number: int) -> bytes:
    return owner + number.to_bytes(4, "big")


def store(index: KVTierIndex, owner: bytes, numbers: range) -> None:
    for number in numbers:
        index.offer(b"root of " + owner, key_of(owner, number), number, 0, number, owner)
    for _, stored in index.copies:
        (index if stored.tier == 0 or index.below is None else index.below).confirm(stored, is_written=True)
    index.copies.clear()
    index.check()


def held(index: KVTierIndex, owner: bytes) -> list[int]:
    return [number for number in range(100) if index.find(key_of(owner, number), 0) is not None]


@pytest.fixture
def index() -> KVTierIndex:
    return KVTierIndex("host", TierLayout((100,), (NUM_SLOTS,)), NUM_SHARES)


def test_a_flood_of_one_owner_lets_only_its_own_blocks_go(index: KVTierIndex) -> None:
    store(index, b"ann", range(3))
    store(index, b"bob", range(60))
    assert held(index, b"ann") == [0, 1, 2]
    assert held(index, b"bob") == [57, 58, 59]


def test_what_storing_takes_for_one_owner_stops_it_for_no_other(index: KVTierIndex) -> None:
    store(index, b"ann", range(1))
    store(index, b"bob", range(1))
    bobs = index.find(key_of(b"bob", 0), 0)
    assert bobs is not None
    index.spend(1.0, [bobs])
    store(index, b"ann", range(1, 3))
    store(index, b"bob", range(1, 3))
    assert (held(index, b"ann"), held(index, b"bob")) == ([0, 1, 2], [0])
    index.earn(2.0, b"ann")
    store(index, b"bob", range(1, 3))
    assert held(index, b"bob") == [0]
    index.earn(2.0, b"bob")
    store(index, b"bob", range(1, 3))
    assert held(index, b"bob") == [0, 1, 2]


def test_steps_of_others_do_not_give_an_owner_time_to_store(index: KVTierIndex) -> None:
    tiers = KVTiers([index])
    store(index, b"ann", range(1))
    anns = index.find(key_of(b"ann", 0), 0)
    assert anns is not None
    index.spend(1.0, [anns])
    tiers.earn_step(100.0, [b"bob", b"bob"])
    store(index, b"ann", range(1, 3))
    assert held(index, b"ann") == [0]
    tiers.earn_step(4.0, [b"bob", b"ann"])
    store(index, b"ann", range(1, 3))
    assert held(index, b"ann") == [0, 1, 2]


def test_what_one_owner_has_in_the_queue_keeps_no_other_from_storing() -> None:
    index = KVTierIndex("disk", TierLayout((10 * 2**20,), (100,)), NUM_SHARES)
    for owner in (b"bob", b"ann"):
        for number in range(5):
            index.offer(b"root of " + owner, key_of(owner, number), number, 0, number, owner)
    assert [stored.owner for _, stored in index.copies] == [b"bob", b"ann"]


def test_an_owner_does_not_notice_that_others_leave_their_shares_empty(index: KVTierIndex) -> None:
    store(index, b"ann", range(10))
    assert held(index, b"ann") == [7, 8, 9]


def test_a_further_owner_stores_nothing_until_a_share_is_empty(index: KVTierIndex) -> None:
    for owner in (b"ann", b"bob", b"cat", b"dan"):
        store(index, owner, range(2))
    store(index, b"eve", range(2))
    assert held(index, b"eve") == []
    index.forget(b"root of cat")
    store(index, b"eve", range(2))
    assert held(index, b"eve") == [0, 1]


def test_without_shares_the_least_recently_used_block_of_all_goes() -> None:
    index = KVTierIndex("host", TierLayout((100,), (4,)))
    store(index, b"ann", range(2))
    store(index, b"bob", range(3))
    assert (held(index, b"ann"), held(index, b"bob")) == ([1], [0, 1, 2])


def test_with_two_tiers_each_owner_has_a_share_in_each(index: KVTierIndex) -> None:
    below = KVTierIndex("disk", TierLayout((100,), (2 * NUM_SLOTS,)), NUM_SHARES, number=1)
    tiers = KVTiers([index, below])
    for first in range(0, 60, 3):
        store(index, b"bob", range(first, first + 3))
        if not first:
            store(index, b"ann", range(6))
    tiers.check()
    assert held(index, b"ann") == [3, 4, 5]
    assert held(below, b"ann") == [0, 1, 2]
    assert held(index, b"bob") == [57, 58, 59]
    assert held(below, b"bob") == list(range(51, 57))


def test_a_tier_that_has_no_slot_for_each_share_is_refused_with_the_size_that_would_do() -> None:
    groups = [BlockGroup(num_blocks=100)]
    with pytest.raises(ConfigError, match="in each of 8 shares; give it at least 8M"):
        TierLayout.plan(4 * 2**20, (2**20 - 4096,), groups, 8)
    assert TierLayout.plan(8 * 2**20, (2**20 - 4096,), groups, 8).num_slots == (8,)
