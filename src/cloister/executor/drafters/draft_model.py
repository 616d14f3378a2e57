"""Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): a small model drafts a chain, one token after another.

Its KV lies in blocks with the numbers of the served model's (`PagedDrafter`, which `spec_infer` uses too).
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


class DraftKV:
    """Counts, for each block, the leading positions with KV of tokens that are known to stand there.

    The KV of a small model lies in blocks with the numbers of the served model's. So prefix hits, forks, copies and wipes carry
    over by themselves: a block that is shared is shared with both, and one that is wiped is wiped in both. What does not carry
    over is that both were computed: a prefix hit may bring a block whose KV the small model never saw, and a step without
    drafts leaves it behind. Hence a count for each block.

    KV of drafts is written without being counted: it lies behind everything that is known, and counts once its tokens do.
    """

    def __init__(self, kv: KVLayout) -> None:
        self.block_size = kv.block_size
        self._filled = [0] * kv.num_blocks
        self._is_written = bytearray(kv.num_blocks)
        self._num_full: dict[int, int] = {}  # of a sequence: leading blocks that were found full

    def reach(self, seq_id: int, blocks: Sequence[int]) -> int:
        """Returns how many leading positions of a sequence have KV.

        What was found full is not looked at again: blocks of a running sequence are not wiped, and a full one is not written.
        """
        filled, size, full = self._filled, self.block_size, min(self._num_full.get(seq_id, 0), len(blocks))
        while full < len(blocks) and filled[blocks[full]] == size:
            full += 1
        self._num_full[seq_id] = full
        return full * size + (filled[blocks[full]] if full < len(blocks) else 0)

    def fill(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Counts positions [start, end): their KV is there, and so is that of all before them."""
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            block, count = blocks[number], min(size, end - number * size)
            if self._filled[block] < count:
                self._filled[block] = count
                self._is_written[block] = 1

    def touch(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Remembers that something is written into [start, end), known or drafted."""
        size = self.block_size
        for number in range(start // size, -(-end // size)):
            self._is_written[blocks[number]] = 1

    def wipe(self, block_ids: Sequence[int]) -> list[int]:
        """Counts blocks as empty; returns those that something was written into."""
        written = [block for block in block_ids if self._is_written[block]]
        for block in written:
            self._filled[block] = self._is_written[block] = 0
        return written

    def copy(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Counts targets as their sources; returns the pairs whose source has something to copy."""
        for source, target in pairs:
            self._filled[target] = self._filled[source]
            self._is_written[target] |= self._is_written[source]
        return [pair for pair in pairs if self._is_written[pair[0]]]

    def forget(self, seq_id: int) -> None:
        """A sequence left; its blocks keep what they hold until they are wiped."""
        self._num_full.pop(seq_id, None)


class PagedDrafter(Drafter):
    """Keeps the KV of one or several small models as far as the sequences go that they draft for.

    Args:
        models: that draft together; each of them has seen what the others have.
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
        self._drafted: dict[int, tuple[int, IntArray]] = {}

    def allocate(self, kv: KVLayout) -> None:
        """Builds the small models, with KV for as many blocks as the model has."""
        self._programs = tuple(model.build(kv) for model in self._models)
        vocab_size, draws = self._context.vocab_size, self._context.sampling_metadata
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
                end = min(start + len(tokens), len(each.state.tokens) - 1)  # the last one is fed anew
                known = each.state.tokens[start:end]
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

    def _begin(self, requests: Sequence[DraftRequest]) -> list[tuple[int, Stretch]]:
        """Returns (place in `requests`, stretch) of those that can be drafted for; moves on those that are too far behind."""
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


class DraftModelDrafter(PagedDrafter):
    """Drafts chains with one small model whose KV goes along with the model's."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a chain for each; `NOTHING` while the small model catches up, or beyond the positions that it learned."""
        drafts = [NOTHING] * len(requests)
        ready = self._begin(requests)
        if ready:
            grown = self._growers[0].grow([stretch for _, stretch in ready])
            for (place, stretch), draft in zip(ready, grown, strict=True):
                self._keep(stretch, draft.token_ids[: stretch.num_drafts - 1], stretch.num_drafts - 1)
                drafts[place] = draft
        return drafts


def common_length(drafted: Sequence[int], known: array[int]) -> int:
    """Returns how many leading tokens are the same."""
    for count, (one, other) in enumerate(zip(drafted, known, strict=False)):
        if one != other:
            return count
    return min(len(drafted), len(known))


@DRAFTERS.register("draft_model", DRAFT_MODEL_THREAT)
def make_draft_model(context: DrafterContext) -> Drafter:
    """Opens the small model (errors as of `open_draft`)."""
    return DraftModelDrafter(context, [open_draft(context)])
