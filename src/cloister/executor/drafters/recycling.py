"""Token Recycling (Luo et al. 2024): the candidates that the model threw away become the branches of later drafts.

The paper keeps one matrix for all requests, and its drafts tell what others wrote; here each sequence has its own. It begins
with what follows what in the prompt, as nothing else is known then, and the model's candidates replace that token by token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from cloister.executor.drafters.adjacency import NUM_BYTES, WIDTH, Adjacency
from cloister.executor.drafters.base import DRAFTERS, Draft, DraftAsk, Drafter, DraftingPlace, VerifyFeedback
from cloister.executor.state import SequenceState
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="context- or datastore-based speculation (REST, Token Recycling, LLMA)",
    threats=frozenset({Requirement.STATELESS}),
    residue="tokens of the request and what the model thought of beside them, until it departs",
    where=("memory of the engine process",),
    attack="another request's draft, or a dump of memory, tells what the text was",
    mitigations=("rows for each sequence, of its own tokens alone", "overwritten when the sequence departs"),
)
MAX_DRAFTS: Final = 32
RANK_RATES: Final = (0.6, 0.09, 0.04, 0.025, 0.015, 0.01, 0.008, 0.006)
"""How often the candidate of each rank comes next (cloister-5m on documentation, its own answers and random prompts)."""
FOLLOWING: Final = 0.75
"""The same of the first rank, where the candidate before it was right."""


def grow_shape(num_places: int) -> tuple[int, ...]:
    """Returns the parents of the tree whose nodes are likeliest to be accepted, likeliest first."""
    rates = ((FOLLOWING, *RANK_RATES[1:]), RANK_RATES)
    heap = [(-RANK_RATES[0], -1, 0, 1.0)]
    parents: list[int] = []
    while len(parents) < num_places:
        negative, parent, rank, chance = heapq.heappop(heap)
        place = len(parents)
        parents.append(parent)
        heapq.heappush(heap, (negative * rates[0][0], place, 0, -negative))
        if rank + 1 < WIDTH:
            heapq.heappush(heap, (-chance * rates[parent < 0][rank + 1], parent, rank + 1, chance))
    return tuple(parents)


@lru_cache(maxsize=256)
def rank_places(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Returns for each place of a shape how many places before it have the same parent."""
    counts: dict[int, int] = {}
    ranks = []
    for parent in parents:
        ranks.append(counts.get(parent, 0))
        counts[parent] = ranks[-1] + 1
    return tuple(ranks)


class RecyclingDrafter(Drafter):
    """Drafts trees from each sequence's own rows.

    Args:
        max_num_seqs: sequences at once, by which memory is counted.
    """

    num_top = WIDTH
    max_drafts = MAX_DRAFTS
    shape = grow_shape(MAX_DRAFTS)

    def __init__(self, max_num_seqs: int) -> None:
        self.fixed_bytes = NUM_BYTES * max_num_seqs
        self._adjacencies: dict[int, Adjacency] = {}

    def draft(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        for each in seen:
            if each.top is not None:
                self._learn(each)

    def forget(self, seq_id: int) -> None:
        if (adjacency := self._adjacencies.pop(seq_id, None)) is not None:
            adjacency.wipe()

    def fork(self, parent_id: int, child_id: int) -> None:
        if (adjacency := self._adjacencies.get(parent_id)) is not None:
            self.forget(child_id)
            self._adjacencies[child_id] = adjacency.copy()

    def _of(self, state: SequenceState) -> Adjacency:
        adjacency = self._adjacencies.get(state.seq_id)
        if adjacency is None:
            adjacency = self._adjacencies[state.seq_id] = Adjacency()
            adjacency.read_text(state.tokens)
        return adjacency

    def _draft(self, ask: DraftAsk) -> Draft:
        shape = (self.shape if ask.parents is None else ask.parents)[: ask.num_drafts]
        adjacency = self._of(ask.state)
        rows = {-1: adjacency.row(ask.state.tokens[-1])}
        kept = {-1: -1}  # places of the shape that have a token, numbered anew
        token_ids: list[int] = []
        parents: list[int] = []
        for place, (parent, rank) in enumerate(zip(shape, rank_places(shape), strict=True)):
            if parent not in kept:
                continue
            if parent not in rows:
                rows[parent] = adjacency.row(token_ids[kept[parent]])
            row = rows[parent]
            if rank < len(row) and row[rank]:
                kept[place] = len(token_ids)
                token_ids.append(row[rank] - 1)
                parents.append(kept[parent])
        return Draft(token_ids, parents)

    def _learn(self, seen: VerifyFeedback) -> None:
        """Takes in the candidates behind every row, those of what was accepted last: of equal tokens these count."""
        assert seen.top is not None
        tokens = np.array([seen.state.tokens[seen.start], *seen.draft.token_ids], np.int32)
        accepted = [0, *(place + 1 for place in seen.path)]
        order = [row for row in range(len(tokens)) if row not in accepted] + accepted
        top = seen.top[order, :WIDTH]
        is_finite = top[:, 0] >= 0
        self._of(seen.state).put(tokens[order][is_finite], top[is_finite])


@DRAFTERS.register("recycling", THREAT)
def make_recycling_drafter(place: DraftingPlace) -> Drafter:
    """Makes the drafter (`DrafterFactory`); it needs nothing."""
    return RecyclingDrafter(place.max_num_seqs)
