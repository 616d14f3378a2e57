"""Values that a model computes from a prompt, as byte patterns: K and V rows as stored in blocks, and logits.

A row has the same bits in any batch (batch invariance), so a copy of the model in another process computes what the node
computed, if its number formats, kernels and block size are the same. A search during a request shows whether they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from cloister.backends.base import LOGITS, ForwardBatch, Program
from cloister.trust.residue.needles import Needle, of_bytes

KV_KIND: Final = "K/V rows"
LOGITS_KIND: Final = "logits"
_SLICE_BYTES: Final = 32
_NUM_SLICES: Final = 6
_FEWEST_VALUES: Final = 12
"""Minimum number of distinct bytes in a slice: zeros and repetitions are found everywhere."""


class BlockReader(Protocol):
    """A program that exposes the bytes of its KV blocks."""

    @property
    def num_layers(self) -> int: ...

    def read_block(self, layer: int, block: int) -> bytes: ...


def rows_of(program: Program, blocks: BlockReader, token_ids: Sequence[int], block_size: int, owner: int) -> Iterator[Needle]:
    """Computes a prompt and yields needles of its first whole block in the first and the last layer, and of its last logits."""
    length = len(token_ids)
    num_blocks = -(-length // block_size)
    batch = ForwardBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(length, dtype=np.int32),
        query_starts=np.array([0, length], np.int32),
        context_lens=np.array([length], np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=np.array([length - 1], np.int32),
    )
    program.wipe_blocks(range(num_blocks))
    logits = program.step(batch, LOGITS).logits
    for layer in sorted({0, blocks.num_layers - 1}):
        for part in _slices(blocks.read_block(layer, 0)):
            yield of_bytes(KV_KIND, owner, part)
    for part in _slices(np.ascontiguousarray(logits[-1], np.float32).tobytes()):
        yield of_bytes(LOGITS_KIND, owner, part)


def _slices(data: bytes) -> Iterator[bytes]:
    """Yields slices at multiples of their size, distributed over the data and unique."""
    starts = range(0, len(data) - _SLICE_BYTES + 1, _SLICE_BYTES)
    full = [start for start in starts if len(set(data[start : start + _SLICE_BYTES])) >= _FEWEST_VALUES]
    step = max(1, len(full) // _NUM_SLICES)
    for start in full[::step][:_NUM_SLICES]:
        yield data[start : start + _SLICE_BYTES]
