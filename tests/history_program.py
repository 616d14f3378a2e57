"""The program of the virtual cluster, which also remembers its batches, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import ForwardBatch, StepOutput, Wants
from cloister.cluster.virtual import history_program
from cloister.cluster.virtual.history_program import FloatArray, history_logits

__all__ = ["HistoryProgram", "greedy_continuation", "history_logits"]


class HistoryProgram(history_program.HistoryProgram):
    """Keeps (token, position) in every slot of every block.

    Args:
        poison: token id whose presence in a history makes its logits NaN.
    """

    def __init__(self, *, vocab_size: int, num_blocks: int, block_size: int, poison: int | None = None, salt: int = 0) -> None:
        super().__init__(vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size, salt=salt)
        self.poison = poison
        self.batches: list[ForwardBatch] = []

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        self.batches.append(batch)
        return super().step(batch, wants)

    def compute(self, batch: ForwardBatch) -> FloatArray:
        assert batch.parents is not None or (batch.context_lens == batch.positions[batch.query_starts[1:] - 1] + 1).all()
        return super().compute(batch)

    def logits_after(self, seen: np.ndarray, adapter: int = 0) -> FloatArray:
        if self.poison is not None and self.poison in seen:
            return np.full(self.vocab_size, np.nan, np.float32)
        return super().logits_after(seen, adapter)


def greedy_continuation(token_ids: Sequence[int], num_tokens: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Returns the `num_tokens` tokens that greedy decoding appends to a prompt."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(history_logits(tokens, vocab_size, salt).argmax()))
    return tokens[len(token_ids) :]
