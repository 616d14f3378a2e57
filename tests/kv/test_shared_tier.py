"""What engines know of a tier that they share: what one has written another finds, once, and for as long as it is there."""

from __future__ import annotations

import random

import pytest

from cloister.kv.shared_tier import SharedTierIndex
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierBlock, TierLayout
from cloister.kv.tiers import KVTiers

NUM_SLOTS = 4
LAYOUT = TierLayout((100,), (NUM_SLOTS,))


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(index: SharedTierIndex, *numbers: int) -> None:
    for number in numbers:
        index.offer(b"root", key_of(number), number, 0, number)
    for _, stored in index.copies:
        index.confirm(stored, is_written=True)
    index.copies.clear()
    index.check()


def announce(index: SharedTierIndex, home: int, *others: SharedTierIndex) -> None:
    """Tells others what has changed, as `engine.kv_pool_member` does."""
    for block in index.take_withdrawn():
        for other in others:
            other.note_elsewhere(home, block.group, block.slot, None)
    for block in index.take_news():
        for other in others:
            other.note_elsewhere(home, block.group, block.slot, as_of(block, home))


def as_of(block: TierBlock, home: int) -> TierBlock:
    return TierBlock(block.root, block.owner, block.key, block.entry, block.group, block.slot, block.number, home=home)


@pytest.fixture
def first() -> SharedTierIndex:
    return SharedTierIndex("shared", LAYOUT, first_number=1 << 40)


@pytest.fixture
def second() -> SharedTierIndex:
    return SharedTierIndex("shared", LAYOUT, first_number=2 << 40)


def test_what_another_engine_has_written_is_found_and_not_stored_again(first: SharedTierIndex, second: SharedTierIndex) -> None:
    assert second.is_empty
    store(first, 1)
    assert second.find(key_of(1), 0) is None
    announce(first, 0, second)
    found = second.find(key_of(1), 0)
    assert found is not None
    assert (found.home, found.number) == (0, 1 << 40)
    assert not second.is_empty
    second.offer(b"root", key_of(1), 1, 0, 7)
    assert (second.copies, len(second)) == ([], 0)
    assert second.take_used_elsewhere() == [found]


def test_nothing_is_announced_before_it_is_written(first: SharedTierIndex) -> None:
    first.offer(b"root", key_of(1), 1, 0, 0)
    assert first.take_news() == []
    ((_, stored),) = first.copies
    first.confirm(stored, is_written=False)
    assert first.take_news() == []


def test_what_is_gone_before_it_was_announced_never_is(first: SharedTierIndex) -> None:
    store(first, 1)
    first.forget(b"root")
    assert (first.take_news(), first.take_withdrawn()) == ([], [])


@pytest.mark.parametrize("way", ["replaced", "forgotten", "unreadable"])
def test_what_is_gone_is_withdrawn(way: str, first: SharedTierIndex, second: SharedTierIndex) -> None:
    store(first, 1)
    announce(first, 0, second)
    if way == "replaced":
        store(first, *range(2, 2 + NUM_SLOTS))
    elif way == "forgotten":
        first.forget(b"root")
    else:
        first.lose(first.find(key_of(1), 0))  # type: ignore[arg-type]
    announce(first, 0, second)
    assert second.find(key_of(1), 0) is None
    assert second.num_elsewhere == len(first)
    second.check()


def test_what_another_engine_uses_stays_longest(first: SharedTierIndex) -> None:
    store(first, 1, 2, 3, 4)
    oldest = first.take_news()[0]
    first.note_used(oldest.group, oldest.slot)
    store(first, 5, 6)
    assert [number for number in range(7) if first.find(key_of(number), 0) is not None] == [1, 4, 5, 6]


def test_a_use_of_a_slot_that_was_written_again_is_no_use(first: SharedTierIndex) -> None:
    store(first, 1, 2, 3, 4)
    (gone, *_) = first.take_news()
    store(first, 5)  # takes the slot of 1, and is not announced
    first.note_used(gone.group, gone.slot)
    store(first, 6, 7, 8)
    assert first.find(key_of(5), 0) is not None
    store(first, 9)
    assert first.find(key_of(5), 0) is None


def test_what_a_use_of_anothers_block_tells_it_comes_once(first: SharedTierIndex, second: SharedTierIndex) -> None:
    store(first, 1)
    announce(first, 0, second)
    found = second.find(key_of(1), 0)
    assert found is not None
    KVTiers([second]).touch([found, found])
    assert second.take_used_elsewhere() == [found]
    assert second.take_used_elsewhere() == []


def test_a_block_of_another_engine_that_does_not_open_is_forgotten_until_it_is_announced_again(
    first: SharedTierIndex, second: SharedTierIndex
) -> None:
    store(first, 1)
    (block,) = first.take_news()
    second.note_elsewhere(0, 0, block.slot, as_of(block, 0))
    found = second.find(key_of(1), 0)
    assert found is not None
    second.lose(found)
    assert second.is_empty
    second.check()
    second.note_elsewhere(0, 0, block.slot, found)
    assert second.find(key_of(1), 0) is found
    second.forget_part(0)
    assert second.is_empty


def test_a_key_that_two_engines_have_stays_found_when_the_earlier_one_loses_it(first: SharedTierIndex) -> None:
    third, fourth = (TierBlock(b"root", b"", key_of(1), 1, 0, slot, slot, home=home) for home, slot in ((2, 0), (3, 1)))
    first.note_elsewhere(2, 0, 0, third)
    first.note_elsewhere(3, 0, 1, fourth)
    first.forget_part(2)
    assert first.find(key_of(1), 0) is fourth


def test_a_block_that_moves_to_a_disk_is_withdrawn_and_stays_this_engines_own(second: SharedTierIndex) -> None:
    shared = SharedTierIndex("shared", TierLayout((100,), (1,)), first_number=1 << 40)
    disk = KVTierIndex("disk", TierLayout((100,), (8,)), number=1)
    tiers = KVTiers([shared, disk])
    store(shared, 1)
    announce(shared, 0, second)
    shared.offer(b"root", key_of(2), 2, 0, 0)
    moved = shared.copies[0][1]
    assert (moved.tier, moved.home, moved.number) == (1, None, 1 << 40)
    announce(shared, 0, second)
    assert second.is_empty
    disk.confirm(moved, is_written=True)
    assert tiers.find(key_of(1), 0) is moved


@pytest.mark.parametrize("seed", range(5))
def test_late_lost_and_doubled_announcements_leave_every_index_whole(seed: int) -> None:
    draw = random.Random(seed)
    indexes = [SharedTierIndex("shared", LAYOUT, first_number=(number + 1) << 40) for number in range(3)]
    late: list[tuple[int, int, int, int, TierBlock | None]] = []
    num_found = 0
    for _ in range(300):
        home = draw.randrange(3)
        index = indexes[home]
        match draw.randrange(5):
            case 0:
                store(index, *(draw.randrange(12) for _ in range(draw.randrange(1, 4))))
            case 1:
                for other in range(3):
                    if other != home:
                        late += [(other, home, b.group, b.slot, None) for b in index.take_withdrawn()]
                        late += [(other, home, b.group, b.slot, as_of(b, home)) for b in index.take_news()]
            case 2:
                while late and draw.random() < 0.8:
                    to, *said = late[draw.randrange(len(late))]
                    if draw.random() < 0.9:
                        indexes[to].note_elsewhere(*said)
                    if draw.random() < 0.9:
                        late.remove((to, *said))  # type: ignore[arg-type]
            case 3:
                found = index.find(key_of(draw.randrange(12)), 0)
                num_found += found is not None and found.home is not None
                if found is not None:
                    (index.touch if draw.random() < 0.7 else index.lose)(found)
                for used in index.take_used_elsewhere():
                    indexes[used.home].note_used(used.group, used.slot)  # type: ignore[index]
            case _ if draw.random() < 0.5:
                index.forget_part((home + 1) % 3)
            case _:
                index.forget(b"root")
        for each in indexes:
            each.check()
    assert num_found > 0
