"""Which branches of a token tree are worth a place (Sequoia, Chen et al. 2024, section 3.1), from measured rates. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def grow_shape(rates: Sequence[Sequence[float]], num_nodes: int) -> tuple[int, ...]:
    """Returns the parents of the tree with the most accepted tokens a step, best place first: any prefix is the best so small.

    Args:
        rates: how often the child of rank r at depth d is the one that is accepted, given that its parent was; depths and ranks
            that are not there have a rate of 0.

    Returns:
        For each node the place of its parent, -1 for the root; fewer than `num_nodes` if rates end before.
    """
    parents: list[int] = []
    # (less than all others' chance to be accepted, order of discovery, parent, depth, rank)
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
