"""What drafters have in common whose small models keep KV in blocks with the numbers of the served model's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from cloister.backends.base import IntArray, KVLayout, Program
from cloister.executor.drafters.base import DraftAsk, Drafter, DraftingPlace, DraftModel, VerifyFeedback
from cloister.executor.drafters.chain import ChainGrower, Stretch
from cloister.executor.drafters.draft_kv import DraftKV
from cloister.executor.state import SequenceState
from cloister.types.threat import Requirement, ThreatProfile

DRAFT_MODEL_THREAT: Final = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="the small model's KV, until its block is free",
    where=("device memory",),
    attack="reuse of an unwiped block; packet sizes and times reveal accepted lengths",
    mitigations=(
        "its KV lies in blocks with the numbers of the model's: same scope, same lease, wiped with them",
        "drafts live no longer than the request",
    ),
)
MAX_CAUGHT_UP: Final = 256
"""Positions that one sequence catches up in a step; while it is further behind, nothing is drafted for it."""
MAX_FOLLOWED: Final = 1024
"""Positions of all sequences that are computed at once beside those of a step's drafts, as activations are budgeted for no more
than the model computes itself; who is left behind catches up later."""
FEW: Final = 32
"""Positions that a sequence may lag behind and count as one that does not: a tree may leave as many."""


class PagedDrafter(Drafter):
    """Keeps the KV of one or several small models as far as the sequences go that they draft for.

    Args:
        models: that draft together; each of them has seen what the others have.
    """

    has_probs = True

    def __init__(self, place: DraftingPlace, models: Sequence[DraftModel]) -> None:
        self._place = place
        self._models = tuple(models)
        self._max_positions = min(model.max_positions for model in models)
        self.kv_block_bytes = sum(model.kv_block_bytes(place.block_size) for model in models)
        self.fixed_bytes = sum(model.weights_bytes for model in models)
        self._programs: tuple[Program, ...] = ()
        self._growers: tuple[ChainGrower, ...] = ()
        self._kv = DraftKV(KVLayout(0, place.block_size))
        self._drafted: dict[int, tuple[int, IntArray]] = {}

    def allocate(self, kv: KVLayout) -> None:
        """Builds the small models, with KV for as many blocks as the model has."""
        self._programs = tuple(model.build(kv) for model in self._models)
        vocab_size, draws = self._place.vocab_size, self._place.draws
        self._growers = tuple(ChainGrower(program, vocab_size, kv.block_size, draws) for program in self._programs)
        self._kv = DraftKV(kv)

    def follow(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        """Computes prompts beside the model, `MAX_FOLLOWED` positions at most."""
        num_left, stretches = MAX_FOLLOWED, []
        for state, end in parts:
            start = self._kv.reach(state.seq_id, state.first_group_blocks)
            count = min(end, self._max_positions) - start
            if count > 0 and num_left:
                stretches.append(self._stretch(state, start, start + min(count, num_left)))
                num_left = max(0, num_left - count)
        self._compute(stretches)

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        """Counts the KV of drafts that became known tokens."""
        for each in seen:
            seq_id = each.state.seq_id
            if seq_id in self._drafted:
                start, tokens = self._drafted.pop(seq_id)
                known = each.state.tokens[
                    start : min(start + len(tokens), len(each.state.tokens) - 1)
                ]  # the last one is fed anew
                count = common_length(tokens.tolist(), known)
                if count:
                    self._kv.fill(each.state.first_group_blocks, start, start + count)
                tokens[:] = 0

    def forget(self, seq_id: int) -> None:
        """Overwrites the drafts of a sequence that left; its KV is wiped with the model's."""
        self._kv.forget(seq_id)
        if seq_id in self._drafted:
            self._drafted.pop(seq_id)[1][:] = 0

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks that something was written into."""
        written = self._kv.wipe(block_ids)
        for program in self._programs if written else ():
            program.wipe_blocks(written)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks that hold something."""
        filled = self._kv.copy(pairs)
        for program in self._programs if filled else ():
            program.copy_blocks(filled)

    def wipe_buffers(self) -> None:
        """Overwrites the buffers of the small models."""
        for program in self._programs:
            program.wipe_buffers()

    def _begin(self, asks: Sequence[DraftAsk]) -> list[tuple[int, Stretch]]:
        """Returns (place among `asks`, stretch) of those that can be drafted for; moves on those that are too far behind."""
        self._drop_drafted()
        ready: list[tuple[int, Stretch]] = []
        behind: list[Stretch] = []
        num_left = MAX_FOLLOWED
        for place, ask in enumerate(asks):
            state = ask.state
            num_known = len(state.tokens)
            count = min(ask.num_drafts, self.max_drafts, self._max_positions - num_known + 1)
            if count < 1:
                continue
            start = min(self._kv.reach(state.seq_id, state.first_group_blocks), num_known - 1)
            stretch = self._stretch(state, start, min(num_known, start + max(FEW, min(MAX_CAUGHT_UP, num_left))))
            if len(stretch.tokens) > FEW:
                num_left -= len(stretch.tokens)
            if stretch.end < num_known:
                behind.append(stretch)
            else:
                stretch.num_drafts, stretch.is_coupled = count, ask.is_coupled
                ready.append((place, stretch))
        self._compute(behind)
        return ready

    def _stretch(self, state: SequenceState, start: int, end: int) -> Stretch:
        return Stretch(state, state.first_group_blocks, start, state.tokens[start:end])

    def _compute(self, stretches: Sequence[Stretch]) -> None:
        for grower in self._growers if stretches else ():
            grower.compute(stretches)
        for each in stretches:
            self._kv.fill(each.blocks, each.start, each.end)

    def _keep(self, stretch: Stretch, tokens: Sequence[int], num_written: int) -> None:
        """Remembers, until the step has been verified, which drafts have KV behind what a stretch computed.

        Args:
            tokens: whose KV lies where a chain of them would have it.
            num_written: positions that were written.
        """
        self._kv.fill(stretch.blocks, stretch.start, stretch.end)
        self._kv.touch(stretch.blocks, stretch.end, stretch.end + num_written)
        if tokens:
            self._drafted[stretch.state.seq_id] = (stretch.end, np.array(tokens, np.int32))

    def _drop_drafted(self) -> None:
        for _, tokens in self._drafted.values():
            tokens[:] = 0
        self._drafted.clear()


def common_length(drafted: Sequence[int], known: array[int]) -> int:
    """Returns how many leading tokens are the same."""
    for count, (one, other) in enumerate(zip(drafted, known, strict=False)):
        if one != other:
            return count
    return min(len(drafted), len(known))
