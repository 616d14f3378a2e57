"""Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): a small model drafts a chain, one token after another.

Its KV uses the block ids of the served model (`PagedDrafter`, which `spec_infer` and `mtp` use too).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from cloister.backends.base import IntArray, KVLayout, Program
from cloister.executor.drafters.base import (
    DRAFTERS,
    NOTHING,
    Draft,
    Drafter,
    DrafterContext,
    DraftModel,
    DraftRequest,
    VerifyFeedback,
)
from cloister.executor.drafters.chain import ChainGrower, Stretch
from cloister.executor.drafters.draft_files import open_draft
from cloister.executor.state import SequenceState
from cloister.types.threat import Requirement, ThreatProfile

DRAFT_MODEL_THREAT: Final = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="the small model's KV, until its block is free",
    where=("device memory",),
    attack="reuse of an unwiped block; packet sizes and times reveal accepted lengths",
    mitigations=(
        "its KV uses the block ids of the model: same scope, same lease, wiped with them",
        "drafts live no longer than the request",
    ),
)
MAX_CAUGHT_UP: Final = 256
"""Most positions by which one sequence catches up in a step; while it lags further behind, nothing is drafted for it."""
MAX_FOLLOWED: Final = 1024
"""Most positions of all sequences computed at once in addition to a step's drafts: activations are budgeted for what the model
computes. Other sequences catch up later."""
FEW: Final = 32
"""Lag in positions that is not counted as lagging: a tree may leave as many."""


class DraftKV:
    """Counts, for each block, the leading positions with KV of known tokens.

    The KV of a small model uses the block ids of the served model. So prefix hits, forks, copies and wipes apply to both: a
    shared block is shared in both, and a wiped one is wiped in both. Only the computed positions differ: the small model may
    not have computed a block of a prefix hit, and steps without drafts leave it behind. Hence a count for each block.

    KV of drafts is written without being counted: it follows all known tokens, and is counted once its tokens are known.
    """

    def __init__(self, kv: KVLayout) -> None:
        self.block_size = kv.block_size
        self._filled = [0] * kv.num_blocks
        self._is_written = bytearray(kv.num_blocks)
        self._num_full: dict[int, int] = {}  # sequence -> leading blocks that are full

    def reach(self, seq_id: int, blocks: Sequence[int]) -> int:
        """Returns how many leading positions of a sequence have KV.

        Full blocks are not checked again: blocks of a running sequence are not wiped, and full ones are not written.
        """
        filled, size, full = self._filled, self.block_size, min(self._num_full.get(seq_id, 0), len(blocks))
        while full < len(blocks) and filled[blocks[full]] == size:
            full += 1
        self._num_full[seq_id] = full
        return full * size + (filled[blocks[full]] if full < len(blocks) else 0)

    def fill(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Marks positions [start, end) as computed, given that all earlier ones are."""
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            block, count = blocks[number], min(size, end - number * size)
            if self._filled[block] < count:
                self._filled[block] = count
                self._is_written[block] = 1

    def touch(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Marks [start, end) as written, with known or drafted tokens."""
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            self._is_written[blocks[number]] = 1

    def wipe(self, block_ids: Sequence[int]) -> list[int]:
        """Marks blocks as empty; returns those that had been written."""
        written = [block for block in block_ids if self._is_written[block]]
        for block in written:
            self._filled[block] = self._is_written[block] = 0
        return written

    def copy(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Copies the counts from sources to targets; returns the pairs whose source had been written."""
        for source, target in pairs:
            self._filled[target] = self._filled[source]
            self._is_written[target] |= self._is_written[source]
        return [pair for pair in pairs if self._is_written[pair[0]]]

    def forget(self, seq_id: int) -> None:
        """Drops a finished sequence; its blocks keep their content until they are wiped."""
        self._num_full.pop(seq_id, None)


class PagedDrafter(Drafter):
    """Holds the KV of one or several small models in blocks with the ids of the served model's.

    Args:
        models: that draft together; all of them have computed the same positions.
    """

    has_probs = True

    def __init__(self, context: DrafterContext, models: Sequence[DraftModel]) -> None:
        self._context = context
        self._models = tuple(models)
        self._max_positions = min(model.max_positions for model in models)
        self.kv_block_bytes = sum(model.kv_block_bytes(context.block_size) for model in models)
        self.fixed_bytes = sum(model.weights_bytes for model in models)
        self._programs: tuple[Program, ...] = ()
        self._growers: tuple[ChainGrower, ...] = ()
        self._kv = DraftKV(KVLayout(0, context.block_size))

    def allocate(self, kv: KVLayout) -> None:
        """Builds the small models, with as many KV blocks as the model has."""
        self._programs = tuple(model.build(kv) for model in self._models)
        vocab_size, draws = self._context.vocab_size, self._context.sampling_metadata
        self._growers = tuple(ChainGrower(program, vocab_size, kv.block_size, draws) for program in self._programs)
        self._kv = DraftKV(kv)

    def forget(self, seq_id: int) -> None:
        """Drops a finished sequence; its KV is wiped with the model's."""
        self._kv.forget(seq_id)

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks that had been written."""
        written = self._kv.wipe(block_ids)
        for program in self._programs if written else ():
            program.wipe_blocks(written)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks that had been written."""
        filled = self._kv.copy(pairs)
        for program in self._programs if filled else ():
            program.copy_blocks(filled)

    def wipe_buffers(self) -> None:
        """Overwrites the buffers of the small models."""
        for program in self._programs:
            program.wipe_buffers()

    def _compute(self, stretches: Sequence[Stretch]) -> None:
        for grower in self._growers if stretches else ():
            grower.compute(stretches)
        for each in stretches:
            self._kv.fill(each.blocks, each.start, each.end)


class FollowingDrafter(PagedDrafter):
    """Small models that read the tokens of the sequences that they draft for."""

    def __init__(self, context: DrafterContext, models: Sequence[DraftModel]) -> None:
        super().__init__(context, models)
        self._drafted: dict[int, tuple[int, IntArray]] = {}

    def follow(self, parts: Sequence[tuple[SequenceState, int]]) -> None:
        """Computes the same prompts as the model, at most `MAX_FOLLOWED` positions."""
        num_left, stretches = MAX_FOLLOWED, []
        for state, end in parts:
            start = self._kv.reach(state.seq_id, state.first_group_blocks)
            count = min(end, self._max_positions) - start
            if count > 0 and num_left:
                stretches.append(self._stretch(state, start, start + min(count, num_left)))
                num_left = max(0, num_left - count)
        self._compute(stretches)

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        """Marks the KV of accepted drafts as computed."""
        for each in seen:
            seq_id = each.state.seq_id
            if seq_id in self._drafted:
                start, tokens = self._drafted.pop(seq_id)
                end = min(start + len(tokens), len(each.state.tokens) - 1)  # the last one is computed again
                known = each.state.tokens[start:end]
                count = common_length(tokens.tolist(), known)
                if count:
                    self._kv.fill(each.state.first_group_blocks, start, start + count)
                tokens[:] = 0

    def forget(self, seq_id: int) -> None:
        """Overwrites the drafts of a finished sequence; its KV is wiped with the model's."""
        super().forget(seq_id)
        if seq_id in self._drafted:
            self._drafted.pop(seq_id)[1][:] = 0

    def _begin(self, requests: Sequence[DraftRequest]) -> list[tuple[int, Stretch]]:
        """Returns (index in `requests`, stretch) of the requests to draft for; catches up those that lag too far behind."""
        self._drop_drafted()
        ready: list[tuple[int, Stretch]] = []
        behind: list[Stretch] = []
        num_left = MAX_FOLLOWED
        for place, request in enumerate(requests):
            state = request.state
            num_known = len(state.tokens)
            count = min(request.num_drafts, self.max_drafts, self._max_positions - num_known + 1)
            if count < 1:
                continue
            start = min(self._kv.reach(state.seq_id, state.first_group_blocks), num_known - 1)
            stretch = self._stretch(state, start, min(num_known, start + max(FEW, min(MAX_CAUGHT_UP, num_left))))
            if len(stretch.tokens) > FEW:
                num_left -= len(stretch.tokens)
            if stretch.end < num_known:
                behind.append(stretch)
            else:
                stretch.num_drafts, stretch.is_coupled = count, request.is_coupled
                ready.append((place, stretch))
        self._compute(behind)
        return ready

    def _stretch(self, state: SequenceState, start: int, end: int) -> Stretch:
        return Stretch(state, state.first_group_blocks, start, state.tokens[start:end])

    def _keep(self, stretch: Stretch, tokens: Sequence[int], num_written: int) -> None:
        """Records, until the step has been verified, which drafts have KV after a stretch.

        Args:
            tokens: drafts whose KV is at the positions of a chain.
            num_written: number of positions that were written.
        """
        self._kv.fill(stretch.blocks, stretch.start, stretch.end)
        self._kv.touch(stretch.blocks, stretch.end, stretch.end + num_written)
        if tokens:
            self._drafted[stretch.state.seq_id] = (stretch.end, np.array(tokens, np.int32))

    def _drop_drafted(self) -> None:
        for _, tokens in self._drafted.values():
            tokens[:] = 0
        self._drafted.clear()


class DraftModelDrafter(FollowingDrafter):
    """Drafts chains with one small model whose KV follows the model's."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a chain for each request; `NOTHING` while the small model catches up, or beyond its maximum position."""
        drafts = [NOTHING] * len(requests)
        ready = self._begin(requests)
        if ready:
            grown = self._growers[0].grow([stretch for _, stretch in ready])
            for (place, stretch), draft in zip(ready, grown, strict=True):
                self._keep(stretch, draft.token_ids[: stretch.num_drafts - 1], stretch.num_drafts - 1)
                drafts[place] = draft
        return drafts


def common_length(drafted: Sequence[int], known: array[int]) -> int:
    """Returns the length of the common prefix."""
    for count, (one, other) in enumerate(zip(drafted, known, strict=False)):
        if one != other:
            return count
    return min(len(drafted), len(known))


@DRAFTERS.register("draft_model", DRAFT_MODEL_THREAT)
def make_draft_model(context: DrafterContext) -> Drafter:
    """Opens the small model (errors as in `open_draft`)."""
    return DraftModelDrafter(context, [open_draft(context)])
