"""Token Recycling (Luo et al. 2024): rejected candidates of the model become the branches of later drafts.

The paper keeps one matrix for all requests, so its drafts reveal what others wrote; here each sequence has its own. It is
initialised with the successors of tokens in the prompt, which the model's candidates replace token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from cloister.executor.drafters.base import DRAFTERS, Draft, Drafter, DrafterContext, DraftRequest, IntArray, VerifyFeedback
from cloister.executor.drafters.token_trees import grow_shape, rank_places
from cloister.executor.state import SequenceState
from cloister.types.threat import Requirement, ThreatProfile

THREAT = ThreatProfile(
    row="context- or datastore-based speculation (REST, Token Recycling, LLMA)",
    threats=frozenset({Requirement.STATELESS}),
    residue="tokens of the request and the model's other candidates, until it departs",
    where=("memory of the engine process",),
    attack="another request's draft, or a memory dump, reveals the text",
    mitigations=("rows for each sequence, of its own tokens alone", "overwritten when the sequence departs"),
)
WIDTH: Final = 8
"""Number of candidates kept for each token."""
NUM_SLOTS: Final = 4096
NUM_BYTES: Final = NUM_SLOTS * (WIDTH + 1) * 4
NUM_READ: Final = 16384
"""Number of tokens of a text that are read, from its end."""
MAX_DRAFTS: Final = 32
RANK_RATES: Final = (0.6, 0.09, 0.04, 0.025, 0.015, 0.01, 0.008, 0.006)
"""Probability that the candidate of each rank is next (cloister-5m on documentation, its own answers and random prompts)."""
FOLLOWING: Final = 0.75
"""The same for the first rank, if the previous candidate was right."""
SHAPE_RATES: Final = (RANK_RATES, *((FOLLOWING, *RANK_RATES[1:]),) * MAX_DRAFTS)


class Adjacency:
    """Candidate successors of each token of one sequence: the matrix of section 3.1, in constant memory.

    A matrix over the vocabulary would take megabytes for each sequence, nearly all of it empty: here the lower bits of a token
    select its slot, and a newer token replaces an older one.
    """

    __slots__ = ("_owners", "_rows")

    def __init__(self) -> None:
        self._owners = np.zeros(NUM_SLOTS, np.int32)  # token + 1; 0 owns nothing
        self._rows = np.zeros((NUM_SLOTS, WIDTH), np.int32)  # token + 1; 0 is none

    def read_text(self, tokens: array[int]) -> None:
        """Adds the successors of each token of a text, latest first."""
        text = np.array(tokens[-NUM_READ:], np.int64)
        if len(text) < 2:
            return
        pairs = text[:-1].copy()
        pairs <<= 32  # in place: the only copies are overwritten below
        pairs |= text[1:]
        pairs = pairs[::-1]
        _, newest = np.unique(pairs, return_index=True)  # the first, thus the latest in the text
        newest = newest[np.lexsort((newest, pairs[newest] >> 32))]
        firsts, seconds = pairs[newest] >> 32, pairs[newest] & 0xFFFFFFFF
        starts = np.flatnonzero(np.append(True, firsts[1:] != firsts[:-1]))
        ranks = np.arange(len(firsts)) - np.repeat(starts, np.diff(np.append(starts, len(firsts))))
        slots = firsts % NUM_SLOTS
        self._owners[slots] = firsts + 1
        is_kept = (ranks < WIDTH) & (self._owners[slots] == firsts + 1)  # of tokens with the same slot the last one wins
        self._rows[slots[is_kept], ranks[is_kept]] = seconds[is_kept] + 1
        for used in (text, pairs, firsts, seconds):  # numpy caches the memory of small arrays without clearing it
            used.fill(0)

    def put(self, tokens: IntArray, candidates: IntArray) -> None:
        """Replaces rows.

        Args:
            tokens: [num_rows]; the last of equal ones counts.
            candidates: [num_rows, WIDTH] candidate successors, best first.
        """
        slots = tokens % NUM_SLOTS
        self._owners[slots] = tokens + 1
        self._rows[slots] = candidates + 1

    def row(self, token: int) -> list[int]:
        """Returns the candidate successors of a token plus 1, best first; 0 is none."""
        slot = token % NUM_SLOTS
        found: list[int] = self._rows[slot].tolist() if self._owners[slot] == token + 1 else []
        return found

    def copy(self) -> Adjacency:
        """Returns an independent copy."""
        twin = Adjacency()
        twin._owners[:] = self._owners
        twin._rows[:] = self._rows
        return twin

    def wipe(self) -> None:
        """Overwrites the content."""
        self._owners.fill(0)
        self._rows.fill(0)


class RecyclingDrafter(Drafter):
    """Drafts trees from each sequence's own rows.

    Args:
        max_num_seqs: maximum number of sequences, for the memory budget.
    """

    num_top = WIDTH
    max_drafts = MAX_DRAFTS
    shape = grow_shape(SHAPE_RATES, MAX_DRAFTS)

    def __init__(self, max_num_seqs: int) -> None:
        self.fixed_bytes = NUM_BYTES * max_num_seqs
        self._adjacencies: dict[int, Adjacency] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

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

    def _draft(self, request: DraftRequest) -> Draft:
        shape = (self.shape if request.parents is None else request.parents)[: request.num_drafts]
        adjacency = self._of(request.state)
        rows = {-1: adjacency.row(request.state.tokens[-1])}
        kept = {-1: -1}  # nodes of the shape that have a token, renumbered
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
        """Adds the candidates of every row, accepted ones last, so that they take precedence for equal tokens."""
        assert seen.top is not None
        tokens = np.array([seen.state.tokens[seen.start], *seen.draft.token_ids], np.int32)
        accepted = [0, *(place + 1 for place in seen.path)]
        order = [row for row in range(len(tokens)) if row not in accepted] + accepted
        top = seen.top[order, :WIDTH]
        is_finite = top[:, 0] >= 0
        self._of(seen.state).put(tokens[order][is_finite], top[is_finite])


@DRAFTERS.register("recycling", THREAT)
def make_recycling_drafter(context: DrafterContext) -> Drafter:
    """Creates the drafter (`DrafterFactory`); it needs no files."""
    return RecyclingDrafter(context.max_num_seqs)
