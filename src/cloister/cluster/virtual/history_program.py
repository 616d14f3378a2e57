"""A tiny program: its KV cache holds tokens, and its logits are a hash of the whole history read back from there.

A wrong block table, a copy not made, a wipe too many, a position off by one, KV of another adapter, a draft that was rejected
and stays: each shows in the logits, or raises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.adapters import AdapterWeights
from cloister.backends.base import Capability, ForwardBatch, IntArray, Program, StepOutput, Wants, check_contents
from cloister.types.errors import EngineError

FloatArray = npt.NDArray[np.float32]
HistoryArray = npt.NDArray[np.int64]
_SCALE = np.float32(8.0) / np.float32(2**24)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NUMBERS = np.arange(1024, dtype=np.uint64)
_ADAPTER = 1 << 32
"""More than there are positions, and weights."""


class WrongSlotError(AssertionError):
    """The block table of a sequence leads to KV that is not its own."""


class HistoryProgram(Program):
    """Keeps (token, position) in every slot of every block; the position also says which adapter computed it.

    Args:
        salt: stands for its weights.
    """

    capabilities = Capability.KV_TRANSFER | Capability.TREES | Capability.ADAPTERS

    def __init__(self, *, vocab_size: int, num_blocks: int, block_size: int, salt: int = 0) -> None:
        self.vocab_size, self.salt = vocab_size, salt
        self.block_size = block_size
        self.slots = np.zeros((num_blocks, block_size, 2), np.int64)
        self._positions = {0: np.arange(num_blocks * block_size).tobytes()}
        self._adapters: dict[int, int] = {}

    def step(self, batch: ForwardBatch, wants: Wants) -> StepOutput:
        """Computes one step (`backends.base.Program.step`)."""
        self._check(wants)
        return StepOutput(logits=self.compute(batch))

    def compute(self, batch: ForwardBatch) -> FloatArray:
        """Writes the batch's tokens, then returns logits [num_rows, vocab] of what the block tables lead to."""
        starts = batch.query_starts.tolist()
        adapters = [0] * (len(starts) - 1) if batch.adapters is None else list(map(self._find_adapter, batch.adapters.tolist()))
        firsts = batch.context_lens.tolist()
        for i, (start, end) in enumerate(pairwise(starts)):
            places = batch.positions[start:end]
            if batch.parents is not None:
                places = np.arange(firsts[i] - (end - start), firsts[i])
            self._write(batch.block_tables[i], places, batch.token_ids[start:end], batch.positions[start:end], adapters[i])
        if batch.parents is None:
            histories = [self._read(*each) for each in zip(batch.block_tables, firsts, adapters, strict=True)]
        logits = np.empty((batch.logit_rows.size, self.vocab_size), np.float32)
        for row, token in enumerate(batch.logit_rows.tolist()):
            i = bisect_right(starts, token) - 1
            if batch.parents is None:
                seen = histories[i][: batch.positions[token] + 1]
            else:
                seen = self._read_path(batch, i, token, adapters[i])
            logits[row] = self.logits_after(seen, adapters[i])
        return logits

    def logits_after(self, seen: HistoryArray, adapter: int = 0) -> FloatArray:
        """Returns the logits [vocab_size] that follow these tokens, with an adapter."""
        return history_logits(seen, self.vocab_size, salt_of(self.salt, adapter))

    def look(self, token_ids: npt.ArrayLike, slot: int) -> FloatArray:
        """Returns the logits [vocab_size] that follow these tokens with the adapter of a slot, -1 for none. Writes no KV."""
        return self.logits_after(np.asarray(token_ids, np.int64), self._find_adapter(slot))

    def load_adapter(self, slot: int, adapter: AdapterWeights) -> None:
        """Puts an adapter of `make_adapter` in a slot."""
        ((number, _),) = adapter.updates.values()
        self._adapters[slot] = int(number[0, 0])

    def unload_adapter(self, slot: int) -> None:
        """Empties a slot."""
        self._adapters.pop(slot, None)

    def move_positions(self, moves: IntArray) -> None:
        """Copies the KV of single positions, in this order."""
        flat = self.slots.reshape(-1, 2)
        for source, target in moves.tolist():
            flat[target] = flat[source]

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

    def _find_adapter(self, slot: int) -> int:
        if slot >= 0 and slot not in self._adapters:
            raise EngineError("a sequence has an adapter that the program does not have")
        return self._adapters.get(slot, 0)

    def _write(self, table: IntArray, places: npt.ArrayLike, tokens: npt.ArrayLike, positions: IntArray, adapter: int) -> None:
        """Writes tokens into the slots at these places of a sequence."""
        places = np.asarray(places)
        where = table[places // self.block_size] * self.block_size + places % self.block_size
        slots = self.slots.reshape(-1, 2)
        slots[where, 0] = np.add(tokens, 1)
        slots[where, 1] = positions if not adapter else positions + np.int64(adapter * _ADAPTER)

    def _read(self, table: IntArray, length: int, adapter: int = 0) -> HistoryArray:
        slots = self.slots[table[: -(-length // self.block_size)]].reshape(-1, 2)[:length]
        if not slots[:, 0].all():
            raise WrongSlotError("a slot is read that was never written, or was wiped")
        if adapter not in self._positions:
            own = np.frombuffer(self._positions[0], np.int64) + adapter * _ADAPTER
            self._positions[adapter] = own.tobytes()
        if slots[:, 1].tobytes() != self._positions[adapter][: slots[:, 1].nbytes]:
            raise WrongSlotError("a slot is read that another position wrote, or another adapter")
        tokens: HistoryArray = slots[:, 0] - 1
        return tokens

    def _read_path(self, batch: ForwardBatch, i: int, token: int, adapter: int) -> HistoryArray:
        """Returns what a token of a tree sees: the context of its sequence, and the tokens on its path."""
        assert batch.parents is not None
        start, path = int(batch.query_starts[i]), []
        first = int(batch.context_lens[i]) - (int(batch.query_starts[i + 1]) - start)
        while token != -1:
            path.append(int(batch.token_ids[token]))
            parent = int(batch.parents[token])
            if not (start <= parent < token or parent == -1):
                raise WrongSlotError("a token of a tree stands before the one that it follows")
            token = parent
        return np.concatenate([self._read(batch.block_tables[i], first, adapter), np.array(path[::-1], np.int64)])


def make_adapter(number: int) -> AdapterWeights:
    """Returns an adapter of this program. Numbers are from 1 on."""
    return AdapterWeights({"history": (np.array([[number]], np.float32), np.zeros((1, 1), np.float32))})


def salt_of(weights: int, adapter: int) -> int:
    """Returns what is added to histories under these weights and an adapter, 0 for none."""
    return weights + adapter * _ADAPTER


def history_logits(token_ids: npt.ArrayLike, vocab_size: int, salt: int = 0) -> FloatArray:
    """Returns the logits [vocab] that follow a history: uniform in [0, 8), a function of all its tokens in order, and the
    salt."""
    tokens = np.asarray(token_ids).astype(np.uint64)
    history = _mix(tokens * _FACTOR + _count(tokens.size)).sum(keepdims=True) + np.uint64(salt)
    bits = _mix(_mix(history) + _count(vocab_size))
    logits: FloatArray = (bits >> np.uint64(40)).astype(np.float32) * _SCALE
    return logits


def prefix_logits(token_ids: npt.ArrayLike, first: int, vocab_size: int, salt: int = 0) -> FloatArray:
    """Returns the logits [num_tokens - first + 1, vocab] that follow each beginning of a history from `first` tokens on."""
    tokens = np.asarray(token_ids, np.uint64)
    with np.errstate(over="ignore"):
        mixed = _mix(tokens * _FACTOR + _count(tokens.size))
        histories = np.append(np.uint64(0), mixed.cumsum(dtype=np.uint64))[first:] + np.uint64(salt)
        bits = _mix(_mix(histories)[:, None] + _count(vocab_size))
    logits: FloatArray = (bits >> np.uint64(40)).astype(np.float32) * _SCALE
    return logits


def _count(count: int) -> npt.NDArray[np.uint64]:
    """Returns the numbers from 0 on."""
    return _NUMBERS[:count] if count <= _NUMBERS.size else np.arange(count, dtype=np.uint64)


def _mix(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.bitwise_xor(bits, bits >> np.uint64(31))
