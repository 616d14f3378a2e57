"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): the layer that the model was trained with to predict the
token after the next drafts a chain, reading its own hidden states in place of the model's from the second draft on.

The layer reads the hidden state of position i together with token i + 1. Its KV of that pair lies at position i, in blocks with
the ids of the model's (`PagedDrafter`). So the pair at the end of a prefix hit is that of the request which computed it: the
hidden state is the same, the token after the hit may be another. It is one of the keys that drafts attend to; answers are those
of the model whatever the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cloister.executor.drafters.base import (
    DRAFTERS,
    NOTHING,
    Draft,
    Drafter,
    DrafterContext,
    DraftModel,
    DraftRequest,
    FloatArray,
    HiddenRows,
)
from cloister.executor.drafters.chain import Stretch
from cloister.executor.drafters.draft_model import PagedDrafter
from cloister.executor.state import SequenceState
from cloister.types.threat import Requirement, ThreatProfile

MTP_THREAT: Final = ThreatProfile(
    row="speculation in general",
    threats=frozenset({Requirement.STATELESS}),
    residue="the layer's KV, until its block is free; hidden states of the last tokens of each request",
    where=("device memory", "host memory"),
    attack="reuse of an unwiped block; packet sizes and times reveal accepted lengths",
    mitigations=(
        "its KV uses the block ids of the model: same scope, same lease, wiped with them",
        "hidden states are overwritten when they are used, and when the request ends",
    ),
)


@dataclass(slots=True, repr=False)
class _Unread:
    """Hidden states of consecutive positions that the layer has not read, after that of the last pair that it did read.

    Attributes:
        start: position of the first.
        rows: [num_positions, hidden].
    """

    start: int
    rows: FloatArray

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def add(self, start: int, rows: FloatArray) -> None:
        """Appends copies of rows, of which the first may be known already."""
        joined = np.concatenate([self.rows, rows[self.end - start :]])
        self.wipe()
        self.rows = joined

    def drop_before(self, position: int) -> None:
        """Overwrites and drops the rows before a position."""
        if position > self.start:
            kept = self.rows[position - self.start :].copy()
            self.wipe()
            self.start, self.rows = position, kept

    def wipe(self) -> None:
        self.rows.fill(0)


class MtpDrafter(PagedDrafter):
    """Drafts chains with one layer behind the model's last.

    After each step the layer reads what completes a block, so that every full block of the model is full here too; the rest
    waits for the next draft.
    """

    wants_every_hidden = True

    def __init__(self, context: DrafterContext, layer: DraftModel) -> None:
        super().__init__(context, [layer])
        self._unread: dict[int, _Unread] = {}
        # of every sequence, a block of hidden states and that of the pair before it
        self.fixed_bytes += 4 * context.max_num_seqs * (context.block_size + 1) * context.hidden_size

    def keep_hidden(self, parts: Sequence[HiddenRows]) -> None:
        """Keeps hidden states until the layer reads them, at the end of each block."""
        stretches = []
        for part in parts:
            unread = self._keep(part)
            if unread is not None:
                end = min(unread.end, len(part.state.tokens) - 1)  # the token after the last position is not known
                if end // self._kv.block_size > unread.start // self._kv.block_size:
                    stretches.append(_stretch(part.state, unread, end))
        self._compute(stretches)
        for each in stretches:
            self._unread[each.state.seq_id].drop_before(each.end - 1)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns a chain for each request; `NOTHING` beyond the layer's maximum position, or without hidden states."""
        drafts = [NOTHING] * len(requests)
        ready: list[tuple[int, Stretch]] = []
        for place, request in enumerate(requests):
            unread, end = self._unread.get(request.state.seq_id), len(request.state.tokens) - 1
            count = min(request.num_drafts, self.max_drafts, self._max_positions - end)
            if unread is not None and unread.start < end == unread.end and count > 0:
                stretch = _stretch(request.state, unread, end)
                stretch.num_drafts, stretch.is_coupled = count, request.is_coupled
                ready.append((place, stretch))
        grown = self._growers[0].grow([stretch for _, stretch in ready]) if ready else []
        for (place, stretch), draft in zip(ready, grown, strict=True):
            self._kv.fill(stretch.blocks, stretch.start, stretch.end)
            self._kv.touch(stretch.blocks, stretch.end, stretch.end + stretch.num_drafts - 1)
            self._unread[stretch.state.seq_id].drop_before(stretch.end - 1)
            drafts[place] = draft
        return drafts

    def forget(self, seq_id: int) -> None:
        """Overwrites the hidden states of a finished sequence; its KV is wiped with the model's."""
        PagedDrafter.forget(self, seq_id)
        unread = self._unread.pop(seq_id, None)
        if unread is not None:
            unread.wipe()

    def fork(self, parent_id: int, child_id: int) -> None:
        """Copies the hidden states that the layer has not read."""
        unread = self._unread.get(parent_id)
        if unread is not None:
            self._unread[child_id] = _Unread(unread.start, unread.rows.copy())

    def _keep(self, part: HiddenRows) -> _Unread | None:
        """Adds hidden states to those of a sequence; None if some before them are missing, so that nothing can be drafted."""
        seq_id = part.state.seq_id
        unread = self._unread.get(seq_id)
        if unread is None and self._kv.reach(seq_id, part.state.first_group_blocks) >= part.start:
            unread = self._unread[seq_id] = _Unread(part.start, part.rows.copy())
        elif unread is not None and unread.start <= part.start <= unread.end:
            unread.add(part.start, part.rows)
        elif unread is not None:
            self.forget(seq_id)
            unread = None
        return unread


def _stretch(state: SequenceState, unread: _Unread, end: int) -> Stretch:
    """Returns the pairs of hidden states and the tokens after them, from the first unread one up to a position."""
    start, rows = unread.start, unread.rows[: end - unread.start]
    return Stretch(state, state.first_group_blocks, start, state.tokens[start + 1 : end + 1], hidden=rows)


@DRAFTERS.register("mtp", MTP_THREAT)
def make_mtp(context: DrafterContext) -> Drafter:
    """Opens the layer of the model's checkpoint.

    Raises:
        CloisterError: the checkpoint has none, or it cannot be read or computed; the message says what to do.
    """
    return MtpDrafter(context, context.open_mtp())
