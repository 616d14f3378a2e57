"""A tiny program: its KV cache holds tokens, and its logits are a hash of the whole history read back from there.

A wrong block table, a copy not made, a wipe too many, a position off by one: each shows in the logits, or raises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.base import Capability, ForwardBatch, Program, StepOutput, Wants, check_contents

FloatArray = npt.NDArray[np.float32]
_SPREAD = np.float32(8.0)


class WrongSlotError(AssertionError):
    """The block table of a sequence leads to KV that is not its own."""


class HistoryProgram(Program):
    """Keeps (token, position) in every slot of every block.

    Args:
        salt: stands for its weights.
    """

    capabilities = Capability.KV_TRANSFER

    def __init__(self, *, vocab_size: int, num_blocks: int, block_size: int, salt: int = 0) -> None:
        self.vocab_size, self.salt = vocab_size, salt
        self.block_size = block_size
        self.slots = np.zeros((num_blocks, block_size, 2), np.int64)
        self._positions = np.arange(num_blocks * block_size).tobytes()

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`)."""
        self._check(wants)
        return StepOutput(logits=self.compute(batch))

    def compute(self, batch: ForwardBatch) -> FloatArray:
        """Writes the batch's tokens, then returns logits [num_rows, vocab] of what the block tables lead to."""
        starts = batch.query_starts.tolist()
        for i, (start, end) in enumerate(pairwise(starts)):
            self._write(batch.block_tables[i], batch.positions[start:end], batch.token_ids[start:end])
        histories = [
            self._read(table, length) for table, length in zip(batch.block_tables, batch.context_lens.tolist(), strict=True)
        ]
        logits = np.empty((batch.logit_rows.size, self.vocab_size), np.float32)
        for row, token in enumerate(batch.logit_rows.tolist()):
            history = histories[bisect_right(starts, token) - 1]
            logits[row] = self.logits_after(history[: batch.positions[token] + 1])
        return logits

    def logits_after(self, seen: npt.NDArray[np.int64]) -> FloatArray:
        """Returns the logits [vocab_size] that follow these tokens."""
        return history_logits(seen, self.vocab_size, self.salt)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, target)."""
        for source, target in pairs:
            self.slots[target] = self.slots[source]

    def wipe_blocks(self, block_ids: Sequence[int]) -> None:
        """Overwrites blocks."""
        self.slots[list(block_ids)] = 0

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Returns what the slots of each block hold."""
        return [self.slots[block].tobytes() for block in block_ids]

    def import_blocks(self, block_ids: Sequence[int], contents: Sequence[bytes | memoryview]) -> None:
        """Overwrites blocks."""
        check_contents(block_ids, [self.slots[block].nbytes for block in block_ids], contents)
        for block, content in zip(block_ids, contents, strict=True):
            self.slots[block] = np.frombuffer(content, np.int64).reshape(self.slots[block].shape)

    def _write(self, table: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], tokens: npt.ArrayLike) -> None:
        where = table[positions // self.block_size] * self.block_size + positions % self.block_size
        slots = self.slots.reshape(-1, 2)
        slots[where, 0] = np.add(tokens, 1)
        slots[where, 1] = positions

    def _read(self, table: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.int64]:
        slots = self.slots[table[: -(-length // self.block_size)]].reshape(-1, 2)[:length]
        if not slots[:, 0].all():
            raise WrongSlotError("a slot is read that was never written, or was wiped")
        if slots[:, 1].tobytes() != self._positions[: slots[:, 1].nbytes]:
            raise WrongSlotError("a slot is read that another position wrote")
        tokens: npt.NDArray[np.int64] = slots[:, 0] - 1
        return tokens


def history_logits(token_ids: npt.ArrayLike, vocab_size: int, salt: int = 0) -> FloatArray:
    """Returns the logits [vocab] that follow a history: uniform in [0, 8), a function of all its tokens in order, and the
    salt."""
    history: FloatArray = prefix_logits(token_ids, np.size(token_ids), vocab_size, salt)[0]
    return history


def prefix_logits(token_ids: npt.ArrayLike, first: int, vocab_size: int, salt: int = 0) -> FloatArray:
    """Returns the logits [num_tokens - first + 1, vocab] that follow each beginning of a history from `first` tokens on."""
    tokens = np.asarray(token_ids, np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(tokens * np.uint64(0x9E3779B97F4A7C15) + np.arange(tokens.size, dtype=np.uint64))
        histories = np.append(np.uint64(0), mixed.cumsum(dtype=np.uint64))[first:] + np.uint64(salt)
        bits = _mix(_mix(histories)[:, None] + np.arange(vocab_size, dtype=np.uint64))
    logits: FloatArray = (bits >> np.uint64(40)).astype(np.float32) * (_SPREAD / np.float32(2**24))
    return logits


def greedy_continuation(token_ids: Sequence[int], num_tokens: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Returns the `num_tokens` tokens that greedy decoding appends to a prompt."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(history_logits(tokens, vocab_size, salt).argmax()))
    return tokens[len(token_ids) :]


def _mix(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.bitwise_xor(bits, bits >> np.uint64(31))
