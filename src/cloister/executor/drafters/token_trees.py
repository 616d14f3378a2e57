"""Token trees: merging continuations, cutting trees to a shape, and choosing good shapes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from cloister.executor.drafters.base import Draft


class Trie:
    """Weighted continuations of one sequence, merged (the tree of SpecInfer, Miao et al. 2024, section 3).

    A node's weight is the sum of the continuations through it.
    """

    __slots__ = ("_children", "_parents", "_tokens", "_weights")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._weights: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token_ids: Sequence[int], weights: Sequence[float]) -> None:
        """Adds a continuation, cut to the length of `weights`.

        Args:
            weights: probability that it is right up to each of its tokens; non-increasing.
        """
        parent = -1
        for token, weight in zip(token_ids, weights, strict=False):
            node = self._children.setdefault((parent, token), len(self._tokens))
            if node == len(self._tokens):
                self._tokens.append(token)
                self._parents.append(parent)
                self._weights.append(weight)
            else:
                self._weights[node] += weight
            parent = node

    def best(self, num_drafts: int, least: float = 0.0) -> Draft:
        """Returns the heaviest nodes as a tree, heaviest first; nodes lighter than `least` are omitted.

        No child weighs more than its parent, and of equal ones the parent was added first: so parents precede children.
        """
        weights = self._weights
        order = sorted([node for node, weight in enumerate(weights) if weight >= least], key=lambda node: -weights[node])
        del order[num_drafts:]
        place = {node: number for number, node in enumerate(order)}
        return Draft([self._tokens[node] for node in order], [place.get(self._parents[node], -1) for node in order])


def fill_shape(draft: Draft, shape: Sequence[int]) -> Draft:
    """Returns the best nodes of a tree that fit into a shape (`Draft.parents`).

    Each node of the shape takes the first remaining child of its parent's node; shape nodes without one are omitted.
    """
    waiting: dict[int, list[int]] = {}
    parents = range(-1, len(draft.token_ids) - 1) if draft.parents is None else draft.parents
    for node in reversed(range(len(draft.token_ids))):
        waiting.setdefault(parents[node], []).append(node)
    node_at, kept_at = {-1: -1}, {-1: -1}  # by index in the shape; the kept ones are renumbered
    kept_parents: list[int] = []
    for place, parent in enumerate(shape):
        if parent in node_at and (rivals := waiting.get(node_at[parent])):
            node_at[place] = rivals.pop()
            kept_at[place] = len(kept_parents)
            kept_parents.append(kept_at[parent])
    return Draft([draft.token_ids[node] for node in list(node_at.values())[1:]], kept_parents)


def grow_shape(rates: Sequence[Sequence[float]], num_nodes: int) -> tuple[int, ...]:
    """Returns the parents of the tree with the most accepted tokens per step, best node first: any prefix is the best tree of
    its size.

    Branches are chosen by measured rates (Sequoia, Chen et al. 2024, section 3.1).

    Args:
        rates: probability that the child of rank r at depth d is accepted, given that its parent was; missing depths and ranks
            have a rate of 0.

    Returns:
        For each node the index of its parent, -1 for the root; fewer than `num_nodes` if the rates have fewer.
    """
    parents: list[int] = []
    # (negated acceptance probability, order of discovery, parent, depth, rank)
    waiting: list[tuple[float, int, int, int, int]] = []
    num_found = 0

    def offer(parent: int, depth: int, rank: int, reached: float) -> None:
        nonlocal num_found
        if depth < len(rates) and rank < len(rates[depth]) and reached * rates[depth][rank] > 0:
            heapq.heappush(waiting, (-reached * rates[depth][rank], num_found, parent, depth, rank))
            num_found += 1

    offer(-1, 0, 0, 1.0)
    reached = {-1: 1.0}
    while waiting and len(parents) < num_nodes:
        chance, _, parent, depth, rank = heapq.heappop(waiting)
        place = len(parents)
        parents.append(parent)
        reached[place] = -chance
        offer(parent, depth, rank + 1, reached[parent])
        offer(place, depth + 1, 0, -chance)
    return tuple(parents)


@lru_cache(maxsize=256)
def rank_places(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns for each node of a shape how many earlier nodes have the same parent."""
    counts: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(counts.get(parent, 0))
        counts[parent] = ranks[-1] + 1
    return tuple(ranks)
