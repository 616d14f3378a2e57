"""Embeddings: pools hidden states of prompts in a step, and accumulates each prompt's vector over its chunks.

A mean is summed in float64, position by position, so that chunking and other requests do not change any bit (batch invariance).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cloister.backends.base import HIDDEN, FloatArray, ForwardBatch, Program, Wants
from cloister.executor.sampling import NOT_FINITE, finite_rows
from cloister.types.request import Embedding, PoolingParams

if TYPE_CHECKING:
    from cloister.executor.inputs import ScheduledSequence

NO_TEXT: Final = "this model is an encoder, which generates no text; ask it for embeddings, scores or classes"
OF_ENCODERS: Final = "this model generates text and is no encoder; pool its prompts by last or mean"
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
        _add(part, rows)
        if part.end == part.state.num_prompt_tokens and part.state.failure is None:
            found[part.plan.seq_id] = _pool_of(part).take()
    return found


def encode_parts(program: Program, parts: list[ScheduledSequence], batch: ForwardBatch) -> dict[int, Embedding]:
    """Like `pool_parts`, for an encoder, which computes a prompt once its last token arrives (`Capability.ENCODER`)."""
    complete = [number for number, part in enumerate(parts) if part.end == part.state.num_prompt_tokens]
    done = [parts[number] for number in complete]
    classifies = [_pool_of(part).params.kind == "classify" for part in done]
    wants = Wants(hidden=not all(classifies), logits=any(classifies))
    rows = batch.query_starts[1:][complete] - 1
    output = program.step(replace(batch, logit_rows=rows.astype(np.int32), token_types=_token_types(parts)), wants)
    ends = np.cumsum(batch.context_lens[complete])[:-1]
    hidden = np.split(output.hidden, ends) if wants.hidden else [output.hidden] * len(done)
    for number, (part, states, is_classified) in enumerate(zip(done, hidden, classifies, strict=True)):
        _add(part, output.logits[number : number + 1] if is_classified else _take_rows(states, _pool_of(part).params))
    return {part.plan.seq_id: _pool_of(part).take() for part in done if part.state.failure is None}


def _take_rows(states: FloatArray, params: PoolingParams) -> FloatArray:
    if params.kind == "mean":
        return states
    return states[:1] if params.kind == "cls" else states[-1:]


def _token_types(parts: list[ScheduledSequence]) -> npt.NDArray[np.int32] | None:
    """Returns the type of each token of a step; None where all are 0."""
    starts = [_pool_of(part).params.second_start for part in parts]
    if all(start is None for start in starts):
        return None
    pairs = zip(parts, starts, strict=True)
    types = [np.arange(p.plan.start, p.end) >= (p.end if start is None else start) for p, start in pairs]
    return np.concatenate(types).astype(np.int32)


def _pool_of(part: ScheduledSequence) -> Pool:
    assert part.state.pool is not None
    return part.state.pool


def _add(part: ScheduledSequence, rows: FloatArray) -> None:
    if not finite_rows(rows).all():
        part.state.failure = NOT_FINITE
    elif len(rows):
        _pool_of(part).add(rows)


def _num_rows(part: ScheduledSequence) -> int:
    """Number of hidden states that this part's pool needs: all, or that of the prompt's last token; they are the
    part's last."""
    if _pool_of(part).params.kind == "mean":
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
