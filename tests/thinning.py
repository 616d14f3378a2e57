"""Which cases of a matrix `make test` runs: enough for every value, or for every kind; `make test-slow` runs the rest."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from itertools import product

import pytest
from _pytest.mark import ParameterSet


def all_examples() -> bool:
    """Whether all random examples are tried, others in each run, as `make test-slow` asks for.

    Otherwise each run of a test tries the same few, so that a change is judged by what it changed.
    """
    return os.environ.get("CLOISTER_TEST_EXAMPLES") == "all"


def examples(num: int) -> int:
    """How many random examples are tried of `num`: a quarter, unless all of them are asked for."""
    return num if all_examples() else max(num // 4, 2)


def thin(cases: Iterable[object], quick: int | Collection[object]) -> list[ParameterSet]:
    """All cases, of which few are quick and the rest is slow.

    Args:
        cases: values of one parameter, or tuples of several.
        quick: how many are quick, spread evenly, the first among them; or which.

    Raises:
        ValueError: one that should be quick is no case.
    """
    listed = list(cases)
    if isinstance(quick, int):
        chosen = {len(listed) * turn // quick for turn in range(quick)}
    else:
        chosen = {listed.index(case) for case in quick}
    return [_param(case, is_quick=place in chosen) for place, case in enumerate(listed)]


def every_second(cases: Iterable[object], first: int = 0) -> list[object]:
    """Every second case, from the one at place `first`: what one test leaves out, another has."""
    return list(cases)[first::2]


def cover(*axes: Iterable[object]) -> list[ParameterSet]:
    """The product of axes, in which as few cases as have every value of each axis are quick, and the rest is slow."""
    listed = [list(axis) for axis in axes]
    if not all(listed):
        return []
    turns = range(max(len(axis) for axis in listed))
    # one further in each round: else an axis of 2 would meet only every other value of one of 4
    chosen = {tuple((turn + place * (turn // len(axis))) % len(axis) for place, axis in enumerate(listed)) for turn in turns}
    places = product(*(range(len(axis)) for axis in listed))
    return [
        _param(tuple(axis[at] for axis, at in zip(listed, place, strict=True)), is_quick=place in chosen) for place in places
    ]


def _param(case: object, *, is_quick: bool) -> ParameterSet:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)
