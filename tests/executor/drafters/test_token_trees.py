"""The shape of a draft tree: no other tree of as many nodes is accepted more, and its beginnings are the best smaller ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from cloister.executor.drafters.branches import kept_chain, levels_of
from cloister.executor.drafters.token_trees import grow_shape

RATES = ((0.5, 0.2, 0.1), (0.6, 0.3), (0.4, 0.35, 0.2))


def expected_accepted(parents: Sequence[int], rates: Sequence[Sequence[float]]) -> float:
    """Returns how many drafts of a tree are accepted on average if children are accepted at these rates."""
    chances: list[float] = []
    depths: list[int] = []
    num_children: dict[int, int] = {}
    for parent in parents:
        depth = 0 if parent < 0 else depths[parent] + 1
        rank = num_children.get(parent, 0)
        num_children[parent] = rank + 1
        rate = rates[depth][rank] if depth < len(rates) and rank < len(rates[depth]) else 0.0
        chances.append((1.0 if parent < 0 else chances[parent]) * rate)
        depths.append(depth)
    return sum(chances)


def all_shapes(size: int) -> Iterator[tuple[int, ...]]:
    """Every tree of so many nodes, parents before children."""
    if size == 0:
        yield ()
        return
    for shape in all_shapes(size - 1):
        for parent in range(-1, size - 1):
            yield (*shape, parent)


@pytest.mark.parametrize("size", range(1, 7))
def test_no_other_tree_of_that_size_is_accepted_more(size: int) -> None:
    best = max(expected_accepted(shape, RATES) for shape in all_shapes(size))
    assert expected_accepted(grow_shape(RATES, size), RATES) == pytest.approx(best)


def test_each_beginning_is_the_tree_of_that_size() -> None:
    whole = grow_shape(RATES, 12)
    assert all(grow_shape(RATES, size) == whole[:size] for size in range(1, 12))
    assert all(-1 <= parent < place for place, parent in enumerate(whole))


def test_rates_of_nothing_end_the_tree() -> None:
    assert grow_shape(((0.5, 0.0), (0.1,)), 9) == (-1, 0)


def test_a_level_computes_what_its_children_follow() -> None:
    first, second, third = levels_of((-1, 0, -1, 1, 2, 0))
    assert first.children == ((0, 2),)
    assert (second.fed, second.rows, second.children) == ((0, 2), (0, 1), ((1, 5), (4,)))
    assert (third.fed, third.parents, third.rows, third.children) == ((0, 1, 2), (-1, 0, -1), (1,), ((3,),))
    assert kept_chain((-1, 0, -1, 1, 2, 0)) == [0, 1]
    assert kept_chain((-1, -1, 1)) == [1]
    assert kept_chain((-1, -1, 1, 0)) == [0]
