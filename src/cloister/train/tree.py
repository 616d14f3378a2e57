"""Which guesses of which heads make the tree that pays: found from measured ranks. Pure: no torch, no files."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RankArray = npt.NDArray[np.int16]
"""[num_places, num_heads]: the rank that a head gave to the right token, `MISSED` or `NOTHING_THERE`."""
MISSED, NOTHING_THERE = -1, -2


class Tree(NamedTuple):
    """Nodes best first: any prefix is a tree.

    Attributes:
        parents: as `Draft.parents`.
        rates: how often each node is expected to be kept.
    """

    parents: list[int]
    rates: list[float]


def accuracy_by_rank(ranks: RankArray, num_ranks: int) -> list[list[float]]:
    """Returns how often the guess of each rank was right, [num_heads][num_ranks]; where nothing was there none was."""
    return [[float((column == rank).mean()) for rank in range(num_ranks)] for column in ranks.T]


def grow_tree(ranks: RankArray, num_ranks: int, num_nodes: int) -> Tree:
    """Returns the tree of that many nodes that keeps most tokens of what was measured, found greedily (Cai et al. 2024, 2.3.3).

    The paper takes a path to be as likely as its heads' accuracies multiplied. Heads are right together more often than that,
    so here paths are counted as they came; the product decides as much as one more place would, which matters for rare paths.
    A better rank counts as no less likely than a worse one, so that siblings stand in order of rank.
    """
    accuracy = accuracy_by_rank(ranks, num_ranks)
    num_places, num_heads = ranks.shape
    parents: list[int] = []
    rates: list[float] = []
    depths: list[int] = []
    alive: list[npt.NDArray[np.bool_]] = []
    waiting: list[tuple[float, int, int]] = []  # minus how likely, parent, rank

    def add_children(parent: int) -> None:
        depth = 0 if parent < 0 else depths[parent] + 1
        if depth == num_heads:
            return
        column = ranks[:, depth] if parent < 0 else ranks[alive[parent], depth]
        rate = 1.0 if parent < 0 else rates[parent]
        above = rate
        for rank in range(num_ranks):
            prior = above * max(accuracy[depth][rank], 0.5 / max(1, num_places))
            rate = min(rate, (int((column == rank).sum()) + prior) / (num_places + 1))
            heapq.heappush(waiting, (-rate, parent, rank))

    add_children(-1)
    while waiting and len(parents) < num_nodes:
        rate, parent, rank = heapq.heappop(waiting)
        depth = 0 if parent < 0 else depths[parent] + 1
        hits = ranks[:, depth] == rank
        alive.append(hits if parent < 0 else hits & alive[parent])
        parents.append(parent)
        rates.append(-rate)
        depths.append(depth)
        add_children(len(parents) - 1)
    return Tree(parents, rates)


def count_kept(ranks: RankArray, parents: Sequence[int]) -> float:
    """Returns how many tokens of a tree are kept on average, with the ranks that were measured."""
    alive: list[npt.NDArray[np.bool_]] = []
    depths: list[int] = []
    children: dict[int, int] = {}
    total = 0.0
    for parent in parents:
        depth = 0 if parent < 0 else depths[parent] + 1
        rank = children.get(parent, 0)
        children[parent] = rank + 1
        hits = ranks[:, depth] == rank
        alive.append(hits if parent < 0 else hits & alive[parent])
        depths.append(depth)
        total += float(alive[-1].mean())
    return total
