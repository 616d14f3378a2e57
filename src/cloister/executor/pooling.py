"""Embeddings: pools hidden states of prompts in a step, and accumulates each prompt's vector over its chunks.

A mean is summed in float64, position by position, so that chunking and other requests do not change any bit (batch invariance).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cloister.backends.base import HIDDEN, FloatArray, ForwardBatch, Program
from cloister.executor.sampling import NOT_FINITE, finite_rows
from cloister.types.request import Embedding, PoolingParams

if TYPE_CHECKING:
    from cloister.executor.inputs import ScheduledSequence

NOT_OFFERED: Final = "this back end computes no embeddings; choose the back end native or torch"


def pool_parts(program: Program, parts: list[ScheduledSequence], batch: ForwardBatch) -> dict[int, Embedding]:
    """Computes a step of pooled sequences; returns seq_id -> vector of those whose prompt is complete.

    Args:
        batch: inputs of these sequences; their rows are found here.
    """
    counts = [_num_rows(part) for part in parts]
    hidden = program.step(replace(batch, logit_rows=_rows(batch, counts)), HIDDEN).hidden
    found = {}
    for part, rows in zip(parts, np.split(hidden, np.cumsum(counts)[:-1]), strict=True):
        pool = part.state.pool
        assert pool is not None
        if not finite_rows(rows).all():
            part.state.failure = NOT_FINITE
            continue
        if len(rows):
            pool.add(rows)
        if part.end == part.state.num_prompt_tokens:
            found[part.plan.seq_id] = pool.take()
    return found


def _num_rows(part: ScheduledSequence) -> int:
    """Number of hidden states that this part's pool needs: all, or that of the prompt's last token; they are the
    part's last."""
    assert part.state.pool is not None
    if part.state.pool.params.kind == "mean":
        return part.plan.num_tokens
    return int(part.end == part.state.num_prompt_tokens)


def _rows(batch: ForwardBatch, counts: list[int]) -> npt.NDArray[np.int32]:
    ends = batch.query_starts[1:]
    return np.concatenate([np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, counts, strict=True)])


class Pool:
    """The accumulated vector of one prompt."""

    __slots__ = ("_num_seen", "_sum", "params")

    def __init__(self, params: PoolingParams) -> None:
        self.params = params
        self._sum: npt.NDArray[np.float64] | None = None
        self._num_seen = 0

    def add(self, rows: FloatArray) -> None:
        """Adds hidden states [num_rows, hidden] in order of position."""
        if self._sum is None:
            self._sum = np.zeros(rows.shape[1])
        for row in rows:  # numpy may sum in another order, which depends on the number of rows
            self._sum += row
        self._num_seen += len(rows)

    def take(self) -> Embedding:
        """Returns the vector: the pooled states, truncated and normalised as requested."""
        assert self._sum is not None
        vector = (self._sum / self._num_seen)[: self.params.dimensions]
        if self.params.normalize:
            vector /= max(float(np.sqrt(np.square(vector).sum())), np.finfo(np.float64).tiny)
        return Embedding(vector.astype("<f4").tobytes())

    def wipe(self) -> None:
        """Overwrites the sum with zeros."""
        if self._sum is not None:
            self._sum[:] = 0
