"""The part of a step that loads get while others decode."""

from __future__ import annotations

import random

import pytest

from cloister.engine.load_pace import LATEST, LOAD_SHARE, LoadPace

ENTRY = 24_576
BYTE_S = 1e-9


def simulate(pace: LoadPace, step_s: float, num_entries: int, compute_s: float, noise: float = 0.0) -> tuple[int, float]:
    """Has a load arrive at once; returns how many steps it took, and how much longer they were until then."""
    draw, left, num_steps, added_s = random.Random(1), num_entries, 0, 0.0
    for _ in range(200):
        pace.note_step(step_s * (1 + draw.uniform(-noise, noise)))
    while left:
        granted, taken = pace.grant([(num_entries * ENTRY, compute_s)]), 0
        while left and granted > 0:
            granted, left, taken = granted - ENTRY, left - 1, taken + ENTRY
        if taken:
            pace.note_load(taken, taken * BYTE_S * (1 + draw.uniform(-noise, noise)))
        num_steps, added_s = num_steps + 1, added_s + taken * BYTE_S
        assert num_steps < 10_000
    return num_steps, added_s / (num_steps * step_s)


@pytest.mark.parametrize("step_s", [0.00025, 0.004, 0.06])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_loads_lengthen_the_steps_of_others_by_their_share(step_s: float, noise: float) -> None:
    pace = LoadPace()
    for _ in range(20):  # it learns what a byte costs
        simulate(pace, step_s, 100, 1e9, noise)
    _, slowed = simulate(pace, step_s, 1000, 1e9, noise)
    assert slowed == pytest.approx(LOAD_SHARE, rel=0.2)


def test_a_load_ends_before_computing_would_by_far_whatever_that_does_to_others() -> None:
    pace, step_s, num_entries = LoadPace(), 0.00025, 100
    compute_s = num_entries * ENTRY * BYTE_S / LOAD_SHARE / 4  # at its share it would take four times as long
    for _ in range(20):
        simulate(pace, step_s, num_entries, compute_s)
    num_steps, slowed = simulate(pace, step_s, num_entries, compute_s)
    assert num_steps * step_s == pytest.approx(LATEST * compute_s, rel=0.1)
    assert slowed > LOAD_SHARE


def test_an_entry_that_costs_more_than_a_steps_share_is_made_up_for_by_later_steps() -> None:
    pace = LoadPace()
    for _ in range(20):
        simulate(pace, 0.0001, 50, 1e9)
    granted = []
    for _ in range(40):
        granted.append(pace.grant([]) > 0)
        if granted[-1]:
            pace.note_load(ENTRY, ENTRY * BYTE_S)
    assert 0 < sum(granted) < len(granted) / 3


def test_before_a_step_was_measured_loads_go_on() -> None:
    pace = LoadPace()
    assert pace.grant([(ENTRY, 1.0)]) > 0
    pace.note_load(ENTRY, 0.5)
    assert pace.grant([(ENTRY, 1.0)]) > 0


def test_what_is_taken_while_nobody_decodes_is_not_owed() -> None:
    pace = LoadPace()
    for _ in range(100):
        pace.note_step(0.001)
    pace.note_load(2**25, 0.02)
    assert not pace.grant([])
    pace.rest()
    assert pace.grant([]) > 0
