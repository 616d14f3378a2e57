"""The noise is a pure function of its key and token, and looks like independent exponential draws."""

import numpy as np
import pytest

from cloister.executor.noise import Noise, noise_keys

CHI_99_9 = {9: 27.88, 63: 103.4, 99: 148.2}
"""Quantiles at 0.999 of the chi-square distribution by degrees of freedom."""


def keys_of(seeds, indexes, positions):
    seeds, indexes, positions = np.broadcast_arrays(seeds, indexes, positions)
    return noise_keys(seeds.astype(np.uint64), indexes.astype(np.int64), positions.astype(np.int64))


def dense(num_ids, keys):
    """Noise of every id, [num_keys, num_ids]."""
    return Noise(num_ids).at(keys[:, None], np.arange(num_ids))


def uniform(noise):
    """Maps Exponential(1) back to uniform."""
    return -np.expm1(-noise.astype(np.float64))


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()


def test_single_tokens_have_the_noise_of_the_whole_vocabulary():
    keys = keys_of(5, 0, np.arange(20))
    whole = dense(1003, keys)
    rows, ids = np.divmod(np.random.default_rng(0).integers(0, whole.size, 500), 1003)
    assert (Noise(1003).at(keys[rows], ids) == whole[rows, ids]).all()
    assert (Noise(2006).at(keys[rows], ids) == whole[rows, ids]).all()


def test_noise_is_positive_and_finite_for_a_great_many_draws():
    for position in range(20):
        drawn = dense(100_000, keys_of(1, 0, [position]))
        assert drawn.dtype == np.float32
        assert (drawn > 0).all()
        assert np.isfinite(drawn).all()


def test_the_extreme_bit_patterns_stay_positive_and_finite():
    from cloister.executor.noise import _exponential

    drawn = _exponential(np.array([0, 1, 2**31, 2**32 - 1], np.uint32))
    assert drawn[0] == pytest.approx(2.0**-33)
    assert drawn[1] == pytest.approx(1.5 * 2.0**-32)
    assert drawn[2] == pytest.approx(np.log(2))
    assert 16 < drawn[3] < 17


def test_noise_is_exponential():
    drawn = uniform(dense(2000, keys_of(123, 0, np.arange(100)))).ravel()
    counts = np.histogram(drawn, bins=100, range=(0, 1))[0]
    assert chi_square(counts, drawn.size / 100) < CHI_99_9[99]
    small = drawn[drawn < 1e-3]
    assert small.size == pytest.approx(200, abs=60)
    assert np.unique(small).size == small.size


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((7, 0, np.arange(50)), (7, 0, np.arange(50) + 1)),
        ((7, 0, np.arange(50)), (7, 1, np.arange(50))),
        ((7, 0, np.arange(50)), (8, 0, np.arange(50))),
        ((7, 3, np.arange(50)), (7, 2, np.arange(50) + 1)),
        ((0, 0, np.arange(50)), (2**63, 0, np.arange(50))),
    ],
    ids=["neighbouring positions", "sequence indexes", "seeds", "index and position", "top bit of the seed"],
)
def test_streams_are_independent(first, second):
    pair = [uniform(dense(2000, keys_of(*key))).ravel() for key in (first, second)]
    counts = np.histogram2d(*pair, bins=8, range=[(0, 1), (0, 1)])[0]
    assert chi_square(counts, pair[0].size / 64) < CHI_99_9[63]
    assert abs(np.corrcoef(*pair)[0, 1]) < 0.012


def test_tokens_are_independent_of_their_neighbours():
    drawn = uniform(dense(2001, keys_of(9, 0, np.arange(50))))
    for lag in (1, 2, 1000):
        counts = np.histogram2d(drawn[:, :-lag].ravel(), drawn[:, lag:].ravel(), bins=8, range=[(0, 1), (0, 1)])[0]
        assert chi_square(counts, counts.sum() / 64) < CHI_99_9[63]


def test_keys_use_all_three_counters_and_do_not_collide():
    seeds, indexes, positions = np.meshgrid(np.arange(32), np.arange(32), np.arange(64), indexing="ij")
    assert np.unique(keys_of(seeds.ravel(), indexes.ravel(), positions.ravel())).size == seeds.size


def test_half_of_the_bits_change_with_any_bit_of_the_key():
    base = np.array([0x0123456789ABCDEF], np.uint64)
    plain = uniform(dense(4096, base)) < 0.5
    for bit in range(64):
        other = uniform(dense(4096, base ^ np.uint64(1 << bit))) < 0.5
        assert 0.45 < (plain != other).mean() < 0.55
