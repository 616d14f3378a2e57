"""The tree of guesses is the best one of its size, and every beginning of it is a tree."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cloister.train.tree import MISSED, NOTHING_THERE, accuracy_by_rank, count_kept, expect_some, grow_tree

ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.25, 0.05], [0.3, 0.1, 0.1]]


def best_by_force(accuracy: list[list[float]], num_nodes: int) -> float:
    """Returns the largest expected number of kept tokens of any tree: its nodes are the likeliest paths."""
    paths = [ranks for depth in (1, 2, 3) for ranks in product(range(3), repeat=depth)]
    rates = [float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)])) for path in paths]
    return sum(sorted(rates, reverse=True)[:num_nodes])


@pytest.mark.parametrize("num_nodes", range(1, 39))
def test_the_tree_is_the_best_of_its_size(num_nodes: int) -> None:
    tree = grow_tree(ACCURACY, num_nodes)
    assert len(tree.parents) == num_nodes
    assert sum(tree.rates) == pytest.approx(best_by_force(ACCURACY, num_nodes))
    assert tree.rates == sorted(tree.rates, reverse=True)


def test_every_beginning_is_the_tree_of_that_size() -> None:
    whole = grow_tree(ACCURACY, 39)
    assert all(-1 <= parent < place for place, parent in enumerate(whole.parents))
    for size in range(1, 39):
        assert grow_tree(ACCURACY, size).parents == whole.parents[:size]


def test_guesses_that_are_never_right_are_no_nodes() -> None:
    assert grow_tree([[0.5, 0.0], [0.0, 0.0]], 10).parents == [-1]
    assert grow_tree([[0.0]], 10).parents == []
    assert grow_tree([], 10).parents == []


def test_heads_that_were_never_right_have_a_tree_too() -> None:
    assert len(grow_tree(expect_some([[0.0, 0.0], [0.0, 0.0]], 100), 6).parents) == 6
    assert expect_some([[0.5, 0.0]], 100) == [[0.5, 0.005]]


def test_a_worse_rank_that_was_right_more_often_does_not_come_first() -> None:
    assert grow_tree([[0.2, 0.6]], 2) == grow_tree([[0.2, 0.2]], 2)


def test_ranks_become_accuracy_and_kept_tokens() -> None:
    ranks = np.array([[0, 0], [0, 1], [1, 0], [MISSED, 0], [0, NOTHING_THERE]], np.int16)
    assert accuracy_by_rank(ranks, 2) == [[0.6, 0.2], [0.6, 0.2]]
    assert count_kept(ranks, [-1]) == pytest.approx(0.6)
    assert count_kept(ranks, [-1, 0]) == pytest.approx(0.8)  # a second token after a wrong first one is not kept
    assert count_kept(ranks, [-1, 0, 0, -1, 3]) == pytest.approx(0.6 + 0.2 + 0.2 + 0.2 + 0.2)
