"""What drafters with heads have in common: one hidden state of each sequence, and the model's own head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import KVLayout
from cloister.backends.draft_heads import DraftHeads
from cloister.executor.drafters.base import DraftAsk, Drafter, DraftingPlace, FloatArray, Guesser, IntArray, VerifyFeedback
from cloister.types.errors import ConfigError


class LastHidden:
    """The hidden state that each sequence's last token was chosen from, as long as it is the last one."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, FloatArray]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, seen: VerifyFeedback) -> None:
        """Takes the row of a step."""
        if seen.hidden is None:
            return
        kept = self._kept.get(seen.state.seq_id)
        row = np.empty(seen.hidden.shape[1], np.float32) if kept is None else kept[1]
        row[:] = seen.hidden[seen.last_row]
        self._kept[seen.state.seq_id] = (len(seen.state.tokens), row)

    def gather(self, asks: list[DraftAsk]) -> tuple[list[int], FloatArray]:
        """Returns which of the asks it has a row for, and their rows [num_found, hidden]."""
        places: list[int] = []
        rows: list[FloatArray] = []
        for place, ask in enumerate(asks):
            kept = self._kept.get(ask.state.seq_id)
            if kept is not None and kept[0] == len(ask.state.tokens) and ask.num_drafts > 0:
                places.append(place)
                rows.append(kept[1])
        return places, np.array(rows, np.float32)

    def forget(self, seq_id: int) -> None:
        kept = self._kept.pop(seq_id, None)
        if kept is not None:
            kept[1].fill(0)

    def copy(self, parent_id: int, child_id: int) -> None:
        kept = self._kept.get(parent_id)
        if kept is not None:
            self.forget(child_id)
            self._kept[child_id] = (kept[0], kept[1].copy())


class HeadDrafter(Drafter):
    """Drafts from the hidden state that each sequence's last token was chosen from.

    Args:
        heads: let go when they are allocated, since what computes them may hold them in other numbers.

    Raises:
        ConfigError: the back end lends no head.
    """

    wants_hidden = True

    def __init__(self, heads: DraftHeads, place: DraftingPlace) -> None:
        if place.guesser is None:
            raise ConfigError("this back end lends no head to drafters; choose one without heads", param="speculate")
        self.num_heads, self.fixed_bytes = heads.num_heads, heads.num_bytes
        self._heads: DraftHeads | None = heads
        self._make_guesser = place.guesser
        self._guesser: Guesser | None = None
        self._last = LastHidden()

    def allocate(self, kv: KVLayout) -> None:
        self._ready_guesser()

    def _ready_guesser(self) -> Guesser:
        if self._guesser is None:
            assert self._heads is not None
            self._guesser, self._heads = self._make_guesser(self._heads), None
        return self._guesser

    def _guess(self, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Returns the likeliest ids of the first heads, best first, [num_heads, num_rows, num_top]."""
        return self._ready_guesser().guess(hidden, num_heads, num_top)

    def observe(self, seen: Sequence[VerifyFeedback]) -> None:
        for one in seen:
            self._last.keep(one)

    def forget(self, seq_id: int) -> None:
        self._last.forget(seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        self._last.copy(parent_id, child_id)
