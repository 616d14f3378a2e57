"""What is used often keeps its slot in a full tier, and what others use changes nothing for an owner."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256

import pytest

from cloister.kv.access_sketch import ACCESSES_PER_KEY, MAX_COUNT, AccessSketch
from cloister.kv.tier_admission import TIER_ADMISSIONS, AdaptiveAdmission, TinyLFU
from cloister.kv.tier_index import KVTierIndex
from cloister.kv.tier_slots import TierLayout
from cloister.kv.tiers import KVTiers

SALT = b"0123456789abcdef"
ROOT = b"root"


def key_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def make_index(num_slots: int, admission: str = "tinylfu", *, num_shares: int = 1, number: int = 0) -> KVTierIndex:
    make = TIER_ADMISSIONS.get(admission)
    layout = TierLayout((100,), (num_slots,))
    return KVTierIndex("host", layout, num_shares, number, make_admission=lambda num: make(num, SALT))


def use(tiers: KVTiers, numbers: Sequence[int], owner: bytes = b"ann") -> None:
    """A request of an owner uses blocks, which the device evicts then."""
    keys = [key_of(number) for number in numbers]
    tiers.note_accesses(keys, owner)
    for number, key in reversed(list(zip(numbers, keys, strict=True))):
        tiers.offer(ROOT + owner, key, number, 0, number, owner)
    for index in reversed(tiers.indexes):
        for _, stored in index.copies:
            tiers.indexes[stored.tier].confirm(stored, is_written=True)
        index.copies.clear()
    tiers.earn(100.0)
    tiers.check()


def held(index: KVTierIndex, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if index.find(key_of(number), 0) is not None]


def test_a_sketch_never_counts_too_few_and_seldom_too_many() -> None:
    sketch, draw = AccessSketch(500, SALT), random.Random(1)
    counts = dict.fromkeys(range(500), 0)
    for _ in range(4000):
        number = min(draw.randrange(500), draw.randrange(500))
        counts[number] += 1
        sketch.add(key_of(number))
    off = [sketch.estimate(key_of(number)) - min(MAX_COUNT, num) for number, num in counts.items()]
    assert min(off) >= 0
    assert sum(off) <= 5


def test_what_was_popular_is_forgotten() -> None:
    sketch = AccessSketch(100, SALT)
    for _ in range(MAX_COUNT + 3):
        sketch.add(key_of(-1))
    assert sketch.estimate(key_of(-1)) == MAX_COUNT
    for number in range(5 * ACCESSES_PER_KEY * 100):
        sketch.add(key_of(number % 100))
    assert sketch.estimate(key_of(-1)) == 0


def test_keys_that_share_counters_share_none_under_another_salt() -> None:
    found: dict[tuple[int, ...], int] = {}
    sketch, other = AccessSketch(1, SALT), AccessSketch(1, SALT[::-1])
    pair = None
    for number in range(50_000):
        places = tuple(sketch._places(key_of(number)))
        if places in found:
            pair = key_of(found[places]), key_of(number)
            break
        found[places] = number
    assert pair is not None, "16 counters in a row are too few for so many keys"
    sketch.add(pair[0])
    other.add(pair[0])
    assert (sketch.estimate(pair[1]), other.estimate(pair[1])) == (1, 0)


@pytest.mark.parametrize(("admission", "kept"), [("tinylfu", [0, 1, 2, 3]), ("auto", [0, 1, 2, 3]), ("always", [])])
def test_a_prefix_that_many_use_outlasts_prompts_that_nobody_sends_again(admission: str, kept: list[int]) -> None:
    tiers = KVTiers([make_index(20, admission)])
    for number in range(40):
        use(tiers, [0, 1, 2, 3, *range(100 * number + 1000, 100 * number + 1024)])
    use(tiers, range(50_000, 50_060))
    assert held(tiers.indexes[0], range(4)) == kept


def test_a_tier_that_has_room_stores_whatever_comes() -> None:
    tiers = KVTiers([make_index(20)])
    use(tiers, range(20))
    assert held(tiers.indexes[0], range(20)) == list(range(20))


def test_what_memory_does_not_admit_goes_from_the_device_to_the_disk_at_once() -> None:
    memory, disk = make_index(4), make_index(20, number=1)
    tiers = KVTiers([memory, disk])
    for _ in range(3):
        use(tiers, range(4))
    memory.num_stored_blocks = 0
    use(tiers, range(10, 16))
    assert held(memory, range(20)) == [0, 1, 2, 3]
    assert held(disk, range(20)) == list(range(10, 16))
    assert memory.num_stored_blocks == 0


def test_no_two_blocks_are_sealed_under_one_number_whichever_tier_they_go_to_first() -> None:
    tiers = KVTiers([make_index(4), make_index(20, number=1)])
    for _ in range(3):
        use(tiers, range(4))
    numbers = [stored.number for index in tiers.indexes for slots in index._slots for stored in slots.blocks.values()]
    tiers.note_accesses([key_of(number) for number in range(10, 16)])
    for number in range(10, 16):
        tiers.offer(ROOT, key_of(number), number, 0, number)
    sealed = [stored.number for index in tiers.indexes for source, stored in index.copies if isinstance(source, int)]
    assert len(sealed) == 6
    assert len({*sealed, *numbers}) == 10


def test_a_block_of_the_disk_comes_to_memory_once_it_is_used_more_often_than_one_there() -> None:
    memory, disk = make_index(4), make_index(20, number=1)
    tiers = KVTiers([memory, disk])
    for _ in range(3):
        use(tiers, range(4))
    for num_uses in range(1, 5):
        use(tiers, [10])
        found = tiers.find(key_of(10), 0)
        assert found is not None
        assert found.tier == (0 if num_uses == 4 else 1), num_uses
        tiers.touch([found])
    assert len(held(memory, range(4))) == 3
    assert len(held(disk, [0, 1, 2, 3])) == 1, "what went for it is on the disk"


@pytest.mark.parametrize("admission", TIER_ADMISSIONS.names())
def test_what_an_owner_keeps_does_not_depend_on_what_others_use(admission: str) -> None:
    def keep(num_others: int) -> list[list[int]]:
        draw, noise = random.Random(1), random.Random(2)
        tiers = KVTiers([make_index(40, admission, num_shares=2)])
        kept = []
        for _ in range(80):
            first = draw.choice([0, 0, draw.randrange(1000)])
            use(tiers, range(first, first + 6))
            kept.append(held(tiers.indexes[0], range(1006)))
            for _ in range(num_others):
                use(tiers, [noise.randrange(1_000_000, 1_000_040) for _ in range(8)], b"bob")
        return kept

    alone = keep(0)
    assert keep(3) == alone
    assert len({tuple(kept) for kept in alone}) > 10, "nothing ever went"


def _count_hits(make: type[TinyLFU] | type[AdaptiveAdmission], requests: Sequence[int], num_slots: int) -> tuple[int, bool]:
    admission = make(num_slots, SALT)
    index = KVTierIndex("host", TierLayout((100,), (num_slots,)), make_admission=lambda num: admission)
    tiers, num_hits = KVTiers([index]), 0
    for number in requests:
        num_hits += index.find(key_of(number), 0) is not None
        use(tiers, [number])
    return num_hits, admission.is_by_frequency


def test_auto_compares_by_frequency_where_few_are_used_often_among_many_that_are_used_once() -> None:
    draw = random.Random(1)
    requests = [draw.randrange(90) if draw.random() < 0.3 else draw.randrange(10**9) for _ in range(2500)]
    assert _count_hits(AdaptiveAdmission, requests, 100)[1]


def test_auto_goes_by_recency_where_what_was_used_lately_is_used_again() -> None:
    requests = [number - back for number in range(1000, 3000) for back in (0, 30)]
    num_hits, is_by_frequency = _count_hits(AdaptiveAdmission, requests, 100)
    assert not is_by_frequency
    assert num_hits > 1.5 * _count_hits(TinyLFU, requests, 100)[0]


def test_every_admission_says_what_it_leaves_behind() -> None:
    assert TIER_ADMISSIONS.names() == ("always", "tinylfu", "auto")
    assert all(threat.residue and threat.mitigations for _, threat in TIER_ADMISSIONS)
