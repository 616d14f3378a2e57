"""The simulation of KV in CXL memory (`benchmarks/cxl_promotion.py`): memory, trackers, and what moves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.cxl_promotion import (
    IDLE_S,
    M5,
    PAGE_BYTES,
    WORDS,
    Damon,
    Ints,
    Machine,
    Reads,
    Sketch,
    Workload,
    make_promoter,
    promote,
    simulate,
    time_reads,
)

LATENCY_BOUND = Machine.make(4, 2.5)
ROWS = [([0, 10 * number + 1, 10 * number + 2], 200) for number in range(40)]


def test_a_read_without_load_takes_the_latency_of_its_memory() -> None:
    read = 64.0 * 64 * 1000
    near_s, near_ns = time_reads(Machine.make(1, 2.5), (read, 0.0), (0.0, 0.0))
    far_s, far_ns = time_reads(Machine.make(1, 2.5), (0.0, read), (0.0, 0.0))
    assert near_ns == pytest.approx(100, rel=0.01)
    assert far_ns == pytest.approx(250, rel=0.01)
    assert near_s == pytest.approx(64 * 1000 / 16 * 100e-9, rel=0.01)
    assert far_s / near_s == pytest.approx(2.5, rel=0.01)


def test_reads_are_no_faster_than_bandwidth_and_moving_takes_some_of_it() -> None:
    machine = Machine.make(1000, 2.5)
    seconds, mean_ns = time_reads(machine, (0.0, 1e9), (0.0, 0.0))
    assert seconds >= 1e9 / machine.tiers[1].bytes_per_s
    assert mean_ns > 500
    assert time_reads(machine, (0.0, 1e9), (0.0, 5e8))[0] > 1.4 * seconds


@pytest.mark.parametrize("num_counters", [64, 1 << 16])
def test_a_sketch_never_counts_too_few(num_counters: int) -> None:
    draw = np.random.default_rng(2)
    keys, counts = np.unique(draw.integers(0, 1 << 40, 500)), draw.integers(1, 100, 500)
    sketch = Sketch(num_counters)
    sketch.add(keys[:250], counts[:250])
    sketch.add(keys[250:], counts[250 : len(keys)])
    found = sketch.estimate(keys)
    assert (found >= counts[: len(keys)]).all()
    assert (found == counts[: len(keys)]).all() == (num_counters > 64)
    sketch.clear()
    assert not sketch.estimate(keys).any()


def read_all(pages: Ints, readers: int = 1, words: int = WORDS) -> Reads:
    return Reads(pages, np.full(len(pages), readers), np.full(len(pages), words))


def test_dense_pages_first_prefers_many_words_among_pages_that_were_read_as_often() -> None:
    work = Workload(ROWS, "dense")
    work.words[:4] = (4, 64, 8, 64)
    reads = Reads(np.arange(4), np.array([64, 4, 32, 4]), work.words[:4])  # 256 reads each
    picked = {}
    for is_dense_first in (False, True):
        tracker = M5(work, 1 << 14, 6, is_dense_first=is_dense_first)
        tracker.observe(reads, np.zeros(4, np.bool_), 1, 0.1)
        picked[is_dense_first] = tracker.pick(np.zeros(work.num_pages, np.bool_), 2).tolist()
    assert picked == {False: [0, 1], True: [1, 3]}


def test_the_tracker_sees_only_reads_of_cxl_memory() -> None:
    work = Workload(ROWS, "dense")
    tracker = M5(work, 1 << 14)
    pages, in_dram = np.arange(10), np.zeros(work.num_pages, np.bool_)
    in_dram[:5] = True
    tracker.observe(read_all(pages), in_dram[:10], 3, 0.1)
    assert sorted(tracker.pick(in_dram, 100).tolist()) == [5, 6, 7, 8, 9]
    assert not len(tracker.pick(in_dram, 100)), "it was cleared"


def test_regions_cover_all_pages_stay_within_their_number_and_find_what_is_read() -> None:
    damon = Damon(4000, sample_s=0.05, is_young_only=True)
    hot = np.arange(1000, 1400)
    numbers = set()
    for _ in range(200):
        damon.observe(read_all(hot), np.zeros(len(hot), np.bool_), 1, 0.05)
        numbers.add(damon.num_regions)
        assert damon.sizes().sum() == 4000
        assert (damon.sizes() > 0).all()
    assert min(numbers) >= 10
    assert max(numbers) <= 1000
    assert len(numbers) > 1
    assert set(damon.pick(np.zeros(4000, np.bool_), 400).tolist()) <= set(hot.tolist())


def test_looking_rarely_misses_reads_that_come_rarely() -> None:
    """A page that is read once in a step of 0.25 s is seen by one look of 5 ms in fifty."""
    hits = {}
    for sample_s in (0.005, 0.25):
        damon = Damon(100, sample_s=sample_s)
        damon.observe(read_all(np.arange(100)), np.zeros(100, np.bool_), 20, 0.25)
        hits[sample_s] = damon.num_hits.mean() / 20
    assert hits[0.005] < 0.1
    assert hits[0.25] == 1


def test_a_page_moves_only_to_a_place_that_was_not_read_lately() -> None:
    in_dram, last_read = np.zeros(8, np.bool_), np.zeros(8)
    assert promote(np.array([0, 1, 2]), in_dram, last_read, 10.0, 2) == 2
    last_read[0] = 10.0 - IDLE_S / 2
    assert promote(np.array([4, 5]), in_dram, last_read, 10.0, 2) == 1
    assert np.flatnonzero(in_dram).tolist() == [0, 4]


def test_nothing_moves_without_a_policy_and_no_more_than_is_allowed_with_one() -> None:
    work = Workload(ROWS, "dense")
    still = simulate(work, make_promoter("none", work), LATENCY_BOUND, work.num_pages)
    assert still.num_moved == 0
    assert still.share == 0
    for name in ("damon", "damon tuned", "m5", "m5 dense", "tables"):
        moving = simulate(work, make_promoter(name, work), LATENCY_BOUND, work.num_pages, 20.0)
        assert 0 < moving.num_moved <= moving.total_s * 20e6 / PAGE_BYTES, name
        assert moving.share > 0, name
        assert moving.mean_ns < still.mean_ns, name


def test_nobody_is_better_than_the_best_pages() -> None:
    work = Workload(ROWS, "sparse")
    num_near = work.num_pages // 20
    best = simulate(work, make_promoter("none", work), LATENCY_BOUND, num_near, is_oracle=True)
    for name in ("damon", "m5", "tables"):
        found = simulate(work, make_promoter(name, work), LATENCY_BOUND, num_near)
        assert found.share <= best.share, name
        assert found.picked <= found.best, name


def test_a_shuffled_pool_reads_the_same_at_other_places() -> None:
    ordered, shuffled = Workload(ROWS, "dense"), Workload(ROWS, "shuffled")
    assert ordered.num_pages == shuffled.num_pages
    uses = []
    for work in (ordered, shuffled):
        pages = np.concatenate([pages for pages, _ in work.requests])
        uses.append(Counter(Counter(pages.tolist()).values()))
    assert uses[0] == uses[1]
    assert not np.array_equal(ordered.requests[0][0], shuffled.requests[0][0])
