"""Measures draft heads on held-out text by the rank of the model's next token, and finds the token tree that pays."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from cloister.backends.base import IntArray
from cloister.train.hidden_states import HiddenStates, Teacher, find_targets, read_rows
from cloister.train.learning import HeadsModule

# Builds the token tree with the best expected gain from measured ranks. Pure: no torch, no files.


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


NUM_RANKS: Final = 10
"""Ranks that are told apart; a tree is no wider."""
MOST_PLACES: Final = 20_000
_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one head at some places.

    Attributes:
        source: "answers" that the model wrote itself, or "text".
        head: from 1; head k guesses the k-th token behind the next one.
        top1, top5: share of places at which its best guess, or one of its best five, was right.
    """

    source: str
    head: int
    top1: float
    top5: float
    num_places: int


@torch.no_grad()
def measure_ranks(
    heads: HeadsModule,
    num_heads: int,
    teacher: Teacher,
    places: HiddenStates,
    choices: IntArray,
    advance: Callable[[int], object],
) -> tuple[RankArray, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Returns the rank of the model's token for each head at held-out places, and which of them are in answers of its own.

    Returns:
        ([num_places, num_heads] int16, `MISSED` where it is not among the first `NUM_RANKS` and `NOTHING_THERE` where the
        passage ends before; [num_places] bool).
    """
    rows = places.having(1, held_out=True)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_PLACES)).astype(np.int64)]
    ranks = np.empty((len(rows), num_heads), np.int16)
    for start in range(0, len(rows), _ROWS):
        some = rows[start : start + _ROWS]
        guesses = heads(read_rows(places, some).float())
        targets = find_targets(places, choices, some, num_heads)
        for head in range(num_heads):
            best = teacher.logits(guesses[head]).topk(min(NUM_RANKS, len(teacher.weight))).indices.numpy()
            hits = best == targets[head][:, None]
            found = np.where(hits.any(1), hits.argmax(1), MISSED)
            ranks[start : start + len(some), head] = np.where(targets[head] < 0, NOTHING_THERE, found)
        advance(len(some))
    return ranks, places.is_own[rows]


def summarise(ranks: RankArray, is_own: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Accuracy]:
    """Returns the accuracy of every head, in the model's answers and in text, of those that there are."""
    found = []
    for source, chosen in (("answers", is_own), ("text", ~is_own)):
        if not chosen.any():
            continue
        for head, whole in enumerate(ranks[chosen].T, 1):
            column = whole[whole != NOTHING_THERE]
            if not len(column):
                continue
            top1, top5 = float((column == 0).mean()), float(((column >= 0) & (column < 5)).mean())
            found.append(Accuracy(source, head, round(top1, 4), round(top5, 4), len(column)))
    return found
