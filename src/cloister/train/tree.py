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


def expect_some(accuracy: Sequence[Sequence[float]], num_places: int) -> list[list[float]]:
    """Returns accuracies in which a guess that was never right at so many places counts as right at one of twice as many.

    So that heads which learned little have a tree too; what it brings is counted when it is used.
    """
    return [[max(share, 0.5 / max(1, num_places)) for share in head] for head in accuracy]


def grow_tree(accuracy: Sequence[Sequence[float]], num_nodes: int) -> Tree:
    """Returns the tree of that many nodes whose expected number of kept tokens is largest (Cai et al. 2024, section 2.3.3).

    A path is as likely as its heads' accuracies multiplied; a better rank counts as no less accurate than a worse one, so that
    siblings stand in order of rank.
    """
    levels = [np.minimum.accumulate(np.array(head, np.float64)).tolist() for head in accuracy]
    parents: list[int] = []
    rates: list[float] = []
    # (minus how likely, parent, depth, rank): a node's next sibling and first child come in when it is taken
    waiting: list[tuple[float, int, int, int]] = [(-levels[0][0], -1, 0, 0)] if levels and levels[0] else []
    while waiting and len(parents) < num_nodes:
        rate, parent, depth, rank = heapq.heappop(waiting)
        if rate == 0:
            break
        place = len(parents)
        parents.append(parent)
        rates.append(-rate)
        above = 1.0 if parent < 0 else rates[parent]
        if rank + 1 < len(levels[depth]):
            heapq.heappush(waiting, (-above * levels[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(levels):
            heapq.heappush(waiting, (rate * levels[depth + 1][0], place, depth + 1, 0))
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
