"""Continuations merged into one token tree, the likeliest nodes first (the tree of SpecInfer, Miao et al. 2024, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.runner.drafters.base import NOTHING, Draft


class Trie:
    """Weighted continuations of one sequence. A node's weight is the sum of those that run through it."""

    __slots__ = ("_children", "_parents", "_tokens", "_weights")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._weights: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token_ids: Sequence[int], weights: Sequence[float]) -> None:
        """Adds a continuation, or as much of it as has weights.

        Args:
            weights: how likely it is that it holds up to each of its tokens; they never rise.
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

    def best(self, num_drafts: int, parents: Sequence[int] | None = None, least: float = 0.0) -> Draft:
        """Returns the heaviest nodes as a tree, heaviest first.

        No child weighs more than its parent, and of equal ones the parent came first: so parents stand before children.

        Args:
            parents: the shape to fill; None takes what is heaviest.
            least: lighter nodes are left out.
        """
        weights = self._weights
        order = sorted([node for node, weight in enumerate(weights) if weight >= least], key=lambda node: -weights[node])
        if parents is not None:
            return self._fill(order, parents[:num_drafts])
        del order[num_drafts:]
        place = {node: number for number, node in enumerate(order)}
        return Draft([self._tokens[node] for node in order], [place.get(self._parents[node], -1) for node in order])

    def _fill(self, order: list[int], shape: Sequence[int]) -> Draft:
        """Gives each place of a shape the heaviest node that is left below its parent's; places without one are left out."""
        waiting: dict[int, list[int]] = {}
        for node in reversed(order):
            waiting.setdefault(self._parents[node], []).append(node)
        nodes, kept, draft_parents = {-1: -1}, {-1: -1}, list[int]()
        for place, parent in enumerate(shape):
            candidates = waiting.get(nodes[parent]) if parent in nodes else None
            if candidates:
                nodes[place] = candidates.pop()
                kept[place] = len(draft_parents)
                draft_parents.append(kept[parent])
        if not draft_parents:
            return NOTHING
        return Draft([self._tokens[node] for node in list(nodes.values())[1:]], draft_parents)
