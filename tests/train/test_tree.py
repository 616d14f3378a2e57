"""The tree of guesses is the best one of its size, and every beginning of it is a tree."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cloister.train.measuring import MISSED, NOTHING_THERE, RankArray, accuracy_by_rank, count_kept, grow_tree

NUM_RANKS = 3


def draw_ranks(num_places: int = 4000) -> RankArray:
    """Heads that are right together: each is sure of itself at some places, and guesses at others."""
    rng = np.random.default_rng(0)
    is_sure = rng.random((num_places, 1)) < 0.4
    guessed = rng.choice([0, 1, 2, MISSED], p=[0.2, 0.15, 0.1, 0.55], size=(num_places, 3))
    sure = rng.choice([0, 1, MISSED], p=[0.85, 0.1, 0.05], size=(num_places, 3))
    return np.where(is_sure, sure, guessed).astype(np.int16)


def best_by_force(ranks: RankArray, num_nodes: int) -> float:
    """Returns the most tokens that any tree keeps: its nodes are the paths that came most often."""
    paths = [path for depth in (1, 2, 3) for path in product(range(NUM_RANKS), repeat=depth)]
    rates = [float((ranks[:, : len(path)] == path).all(1).mean()) for path in paths]
    return sum(sorted(rates, reverse=True)[:num_nodes])


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 6, 8, 12, 20, 39])
def test_the_tree_keeps_as_much_as_any_of_its_size(num_nodes: int) -> None:
    ranks = draw_ranks()
    tree = grow_tree(ranks, NUM_RANKS, num_nodes)
    assert len(tree.parents) == num_nodes
    assert count_kept(ranks, tree.parents) == pytest.approx(best_by_force(ranks, num_nodes), rel=0.003)
    assert sum(tree.rates) == pytest.approx(count_kept(ranks, tree.parents), abs=0.01)
    assert tree.rates == sorted(tree.rates, reverse=True)


def test_every_beginning_is_the_tree_of_that_size() -> None:
    whole = grow_tree(draw_ranks(), NUM_RANKS, 39)
    assert all(-1 <= parent < place for place, parent in enumerate(whole.parents))
    for size in range(1, 39):
        assert grow_tree(draw_ranks(), NUM_RANKS, size).parents == whole.parents[:size]


def test_heads_that_are_right_together_make_the_tree_deep() -> None:
    together = np.array([[0, 0, 0]] * 50 + [[MISSED] * 3] * 30 + [[1, MISSED, MISSED]] * 20, np.int16)
    apart = together.copy()
    rng = np.random.default_rng(1)
    for column in range(1, 3):
        apart[:, column] = rng.permutation(apart[:, column])  # the same accuracy of every head
    assert grow_tree(together, NUM_RANKS, 4).parents == [-1, 0, 1, -1]
    assert grow_tree(apart, NUM_RANKS, 4).parents != [-1, 0, 1, -1]


def test_heads_that_were_never_right_have_a_tree_too() -> None:
    assert len(grow_tree(np.full((100, 2), MISSED, np.int16), NUM_RANKS, 6).parents) == 6


def test_a_worse_rank_that_was_right_more_often_does_not_come_first() -> None:
    ranks = np.array([[0]] * 20 + [[1]] * 60 + [[MISSED]] * 20, np.int16)
    assert grow_tree(ranks, 2, 2).rates == pytest.approx([0.2, 0.2], abs=0.01)


def test_ranks_become_accuracy_and_kept_tokens() -> None:
    ranks = np.array([[0, 0], [0, 1], [1, 0], [MISSED, 0], [0, NOTHING_THERE]], np.int16)
    assert accuracy_by_rank(ranks, 2) == [[0.6, 0.2], [0.6, 0.2]]
    assert count_kept(ranks, [-1]) == pytest.approx(0.6)
    assert count_kept(ranks, [-1, 0]) == pytest.approx(0.8)  # a second token after a wrong first one is not kept
    assert count_kept(ranks, [-1, 0, 0, -1, 3]) == pytest.approx(0.6 + 0.2 + 0.2 + 0.2 + 0.2)
