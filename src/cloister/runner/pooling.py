"""The part of a step that pools: hidden states of prompts, and the vectors of those that are complete."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cloister.backends.base import ForwardBatch, HiddenProgram
from cloister.runner.inputs import Part, forward_batch
from cloister.runner.sampling import finite_rows
from cloister.types.request import Embedding

NOT_OFFERED = "this back end computes no embeddings; choose the back end native or torch"
NOT_FINITE = "the model computed a value that is not a finite number; send the request again or choose another dtype"


def pool_parts(program: HiddenProgram, parts: list[Part], block_size: int) -> dict[int, Embedding]:
    """Computes a step of sequences that are pooled; returns seq_id -> vector of those whose prompt is complete."""
    counts = [_num_rows(part) for part in parts]
    batch = forward_batch(parts, block_size)
    hidden = program.forward_hidden(replace(batch, logit_rows=_rows(batch, counts)))
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


def _num_rows(part: Part) -> int:
    """Hidden states that this part's pool wants: all, or that of the prompt's last token; they end with the part."""
    assert part.state.pool is not None
    if part.state.pool.params.kind == "mean":
        return part.plan.num_tokens
    return int(part.end == part.state.num_prompt_tokens)


def _rows(batch: ForwardBatch, counts: list[int]) -> npt.NDArray[np.int32]:
    ends = batch.query_starts[1:]
    return np.concatenate([np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, counts, strict=True)])
