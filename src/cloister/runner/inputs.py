"""Turns the parts of a plan into the arrays of one forward: token ids, positions, block tables, rows of logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from cloister.backends.base import ForwardBatch, IntArray
from cloister.runner.state import SequenceState
from cloister.runner.tables import BlockTables
from cloister.types.errors import EngineError
from cloister.types.step import SequencePlan


class Part(msgspec.Struct):
    """One sequence's part of a step, with its state.

    Attributes:
        end: one past the last position computed.
        num_prompt_rows: positions whose logits score the next prompt token; 0 unless prompt logprobs were asked for.
        num_rows: rows of logits that this part needs: those of the prompt, then the one to sample from.
    """

    plan: SequencePlan
    state: SequenceState
    end: int
    num_prompt_rows: int
    num_rows: int


def make_part(plan: SequencePlan, state: SequenceState) -> Part:
    """Returns a plan's part beside the sequence that it names."""
    end = plan.start + plan.num_tokens
    num_prompt_rows = 0
    if state.sampling.prompt_logprobs is not None:
        num_prompt_rows = max(0, min(end, state.num_prompt_tokens - 1) - plan.start)
    return Part(plan, state, end, num_prompt_rows, num_prompt_rows + plan.num_samples)


def forward_batch(parts: Sequence[Part], tables: BlockTables, block_size: int) -> ForwardBatch:
    """Builds the arrays for `parts`, at least one.

    Raises:
        EngineError: a part does not fit what the runner knows of its sequence.
    """
    for part in parts:
        _check(part, tables, block_size)
    ends = [part.end for part in parts]
    counts = [part.plan.num_tokens for part in parts]
    context_lens = np.array(ends, np.int32)
    query_starts = np.array([0, *accumulate(counts)], np.int32)
    positions = context_lens - np.int32(1)
    if max(counts) > 1:
        shifts = np.repeat(context_lens - query_starts[1:], counts)
        positions = np.arange(query_starts[-1], dtype=np.int32) + shifts
    return ForwardBatch(
        token_ids=_token_ids(parts),
        positions=positions,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=tables.gather([part.state.slot for part in parts], -(-max(ends) // block_size)),
        logit_rows=_logit_rows(parts, counts),
    )


def _token_ids(parts: Sequence[Part]) -> IntArray:
    token_ids = array("i")
    for part in parts:
        token_ids += part.state.tokens[part.plan.start : part.end]
    return np.frombuffer(token_ids, np.int32)


def _logit_rows(parts: Sequence[Part], counts: Sequence[int]) -> IntArray:
    """Lists, part by part, the tokens whose logits are wanted."""
    rows: list[int] = []
    end = 0
    for part, count in zip(parts, counts, strict=True):
        start, end = end, end + count
        if part.num_prompt_rows:
            rows += range(start, start + part.num_prompt_rows)
        if part.plan.num_samples:
            rows.append(end - 1)
    return np.array(rows, np.int32)


def _check(part: Part, tables: BlockTables, block_size: int) -> None:
    plan, num_known, end = part.plan, len(part.state.tokens), part.end
    if plan.num_tokens < 1 or plan.start < 0 or end > num_known:
        raise EngineError(f"the step plan asks for positions of sequence {plan.seq_id} that have no token yet")
    if plan.num_samples:
        if plan.num_samples != 1:
            raise _unverified()
        if end != num_known:
            raise EngineError(f"the step plan samples sequence {plan.seq_id} before its last token")
    if plan.parents is not None:
        raise _unverified()
    if tables.sizes[part.state.slot] * block_size < end:
        raise EngineError(f"the block table of sequence {plan.seq_id} ends before its tokens do")


def _unverified() -> EngineError:
    return EngineError("this runner verifies no drafts: a part samples at most one token and has no parents")
