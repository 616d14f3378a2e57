"""Where computing the front of a prefix and loading its end meet: as early as they can."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.kv.two_sided import FIRST_SHARE, TwoSidedRestore
from tests.thinning import examples


def compute_at(seconds: float, growth: float = 0.0):
    """Returns a time for computing in which every entry takes a little longer than the one before."""
    return lambda start, end: seconds * (end - start) + growth * (end**2 - start**2)


def restore_of(num_entries: int, byte_s: float, first: int = 0) -> TwoSidedRestore:
    return TwoSidedRestore(first, [(0, 1000)] * num_entries, [byte_s])


@settings(max_examples=examples(200), deadline=None)
@given(
    tiers=st.lists(st.integers(0, 1), min_size=1, max_size=60),
    first=st.integers(0, 20),
    byte_s=st.tuples(st.floats(0.0, 1e-5), st.floats(0.0, 1e-4)),
    seconds=st.floats(1e-5, 1e-2),
    growth=st.floats(0.0, 1e-4),
)
def test_no_other_place_to_meet_is_faster(tiers, first, byte_s, seconds, growth):
    restore = TwoSidedRestore(first, [(tier, 1000) for tier in tiers], byte_s)
    compute_s = compute_at(seconds, growth)

    def taken_s(place: int) -> float:
        load_s = sum(1000 * byte_s[tier] for tier in tiers[place - first :])
        return max(compute_s(first, place), load_s)

    best_s = min(taken_s(place) for place in range(first, restore.end + 1))
    place = restore.find_meeting(first, restore.end, compute_s)
    assert first <= place <= restore.end
    each_s = max(compute_s(restore.end - 1, restore.end), *(1000 * each for each in byte_s))
    assert taken_s(place) <= best_s + each_s, "more than one entry from the best place"
    assert restore.predict_s(compute_s) == pytest.approx(taken_s(place))


@pytest.mark.parametrize("ratio", [0.2, 1.0, 4.0])
def test_both_at_once_take_the_product_of_their_times_over_the_sum(ratio):
    compute_s, load_s = 1.0, ratio
    restore = restore_of(400, load_s / 400_000)
    assert restore.predict_s(compute_at(compute_s / 400)) == pytest.approx(compute_s * load_s / (compute_s + load_s), rel=0.02)


def test_the_first_step_goes_a_part_of_the_way_and_the_next_one_all_of_it_at_the_speed_that_was_seen():
    restore, compute_s = restore_of(100, 1e-6, first=10), compute_at(1e-3)
    assert restore.find_next(10, 110, compute_s) == 10 + 50 * FIRST_SHARE
    restore.note([(10_000, 0.04)])  # four times as slow as it was: 2.5 ms an entry, with what was known
    assert restore.find_next(35, 100, compute_s) == 35 + 47
    restore.note([(50_000, 0.005)])  # ten times as fast: 0.25 ms
    assert restore.find_next(35, 60, compute_s) == 35 + 5


@pytest.mark.parametrize("byte_s", [0.0, 1e9])
def test_a_step_computes_something_and_nothing_that_has_arrived(byte_s):
    restore = restore_of(10, byte_s)
    assert restore.find_next(4, 5, compute_at(1e-3)) == 5
    assert 4 < restore.find_next(4, 8, compute_at(1e-3)) <= 8


def test_parts_are_a_sixteenth_and_not_so_small_that_a_fast_tier_becomes_slow():
    assert restore_of(160, 1e-6).part_bytes == 10_000
    assert restore_of(160, 2e-8).part_bytes == 50_000  # a millisecond
    assert restore_of(160, 0.0).part_bytes == 160_000
