"""What is shown of a minute is as likely, up to a factor of two, whether any one request was there or not."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import product

import pytest

from cloister.policy.counts import SHOWN_FROM, WINDOW_S, NoisyWindows, Window, draw_noise

MINUTE = 30_000_000 * WINDOW_S
DEPTH = 14
"""Flips of a coin that are enumerated; few draws need more."""


class OutOfBitsError(Exception):
    pass


def law() -> dict[int, Fraction]:
    """What the real code draws, over every row of `DEPTH` flips of a coin."""
    found: dict[int, Fraction] = defaultdict(Fraction)
    for flips in product((0, 1), repeat=DEPTH):
        row = iter(flips)
        with suppress(OutOfBitsError):
            found[draw_noise(lambda row=row: flip(row))] += Fraction(1, 2**DEPTH)  # type: ignore[misc]
    return found


def flip(row: Iterator[int]) -> int:
    for bit in row:
        return bit
    raise OutOfBitsError


def test_whether_a_request_was_there_at_most_doubles_the_odds_of_anything_shown() -> None:
    """The noise n has probability 2^-|n| / 3, up to draws that need more flips than are tried; a request shifts it by one."""
    found = law()
    for number in range(-4, 5):
        assert 0 <= Fraction(1, 3 * 2 ** abs(number)) - found[number] < Fraction(1, 2**DEPTH)
        assert Fraction(49, 100) < found[number] / found[number - 1] < Fraction(51, 25)


class Coin:
    """Bits of a seed; two windows with one seed have one noise."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> int:
        return self._random.getrandbits(1)


def fill(windows: NoisyWindows, num_requests: int, at_s: float = MINUTE, cell: int = 0) -> None:
    for _ in range(num_requests):
        windows.count(cell, at_s)


def test_two_readings_in_one_minute_are_the_same_whatever_ended_between_them() -> None:
    windows = NoisyWindows(2)
    fill(windows, 500)
    before = windows.last(MINUTE + 61)
    assert isinstance(before, Window)
    fill(windows, 1, MINUTE + 62)
    assert windows.last(MINUTE + 119) == before


def test_the_difference_of_two_minutes_does_not_tell_one_request_even_who_knows_all_others() -> None:
    """Who sends 500 requests, with one of somebody else's or without, sees the same counts nearly as often."""
    seen: dict[bool, list[int]] = {True: [], False: []}
    for seed in range(1500):
        for is_there in (True, False):
            windows = NoisyWindows(1, Coin(seed * 2 + is_there))
            fill(windows, 500 + is_there)
            window = windows.last(MINUTE + 60)
            assert window is not None
            seen[is_there].append(window.counts[0])
    guessed_right = sum(count > 500 for count in seen[True]) + sum(count <= 500 for count in seen[False])
    assert guessed_right / 3000 < 2 / 3 + 0.03  # the best guess there is, by the bound of two; certainty would be 1


def test_minutes_of_fewer_than_twenty_are_not_shown() -> None:
    """By the law of the noise, not by chance: six cells would have to add 31 or more."""
    one = {number: 2.0 ** -abs(number) / 3 for number in range(-80, 81)}
    total = one
    for _ in range(5):
        summed: dict[int, float] = defaultdict(float)
        for (a, p), (b, q) in product(total.items(), one.items()):
            summed[a + b] += p * q
        total = summed
    assert sum(p for number, p in total.items() if 19 + number >= SHOWN_FROM) < 1e-6
    windows = NoisyWindows(6)
    fill(windows, 19)
    assert windows.last(MINUTE + 60) is None


def test_a_minute_is_shown_for_one_minute_and_nothing_adds_up() -> None:
    windows = NoisyWindows(1)
    fill(windows, 500)
    assert windows.last(MINUTE + 59) is None
    first = windows.last(MINUTE + 60)
    assert first is not None
    assert first.end_s == MINUTE + 60
    assert windows.last(MINUTE + 120) is None
    fill(windows, 500, MINUTE + 120)
    again = windows.last(MINUTE + 180)
    assert again is not None
    assert again.counts[0] < 600
    fill(windows, 500, MINUTE + 180)
    assert windows.last(MINUTE + 300) is None


@pytest.mark.parametrize("seed", range(20))
def test_no_count_is_below_zero(seed: int) -> None:
    windows = NoisyWindows(4, Coin(seed))
    fill(windows, 500)
    window = windows.last(MINUTE + 60)
    assert window is not None
    assert min(window.counts) >= 0
