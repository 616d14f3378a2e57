"""The bits that a number of frames tells."""

from __future__ import annotations

import pytest

from benchmarks.traffic.leak import count_bits, count_waste


def test_one_bucket_tells_nothing_and_two_equal_ones_tell_a_bit() -> None:
    assert count_bits([1, 5, 64]) == 0
    assert count_bits([10, 100]) == 1
    assert count_bits([10, 100, 300, 2000]) == 2


def test_an_exact_length_tells_more_than_its_bucket() -> None:
    lengths = range(1, 1025)
    assert count_bits(lengths, lambda n: n) == pytest.approx(10)
    assert count_bits(lengths) < 1.2


def test_padding_costs_what_it_adds() -> None:
    assert count_waste([64, 256]) == 1
    assert count_waste([32]) == 2


def test_no_lengths_are_no_distribution() -> None:
    with pytest.raises(ValueError, match="at least one"):
        count_bits([])
