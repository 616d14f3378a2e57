"""The table of docs/routing.md: how many requests find how much steering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.routing_power import CHANCES, RATES, RESULT, TRIALS, cell_power, cell_requests, make_table, try_cell

DOCUMENT = Path(__file__).parents[3] / "docs" / "routing.md"


def test_the_page_shows_what_the_code_prints() -> None:
    found = json.loads(RESULT.read_text())
    assert make_table(found) in DOCUMENT.read_text(), "print it anew: python -m benchmarks.routing_power --table"


@pytest.mark.parametrize("rate", RATES)
def test_what_was_tried_agrees_with_what_was_computed(rate: float) -> None:
    found = json.loads(RESULT.read_text())
    for chance in CHANCES:
        requests = cell_requests(rate, chance)
        power = cell_power(rate, requests)
        assert cell_power(rate, requests - 1) < chance <= power
        deviation = (power * (1 - power) * TRIALS) ** 0.5
        assert abs(found[f"{rate} {requests}"] - power * TRIALS) < 4 * deviation


def test_a_cell_that_is_tried_again_comes_out_alike() -> None:
    assert 14 <= try_cell(0.20, cell_requests(0.20, 0.90), trials=20, first=1000) <= 20
    assert try_cell(0, cell_requests(0.20, 0.90), trials=10, first=1000) == 0
