"""Turns the parts of a plan into the arrays of one forward: token ids, positions, block tables, rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloister.backends.base import ForwardBatch, IntArray
from cloister.runner.state import SequenceState
from cloister.types.errors import EngineError
from cloister.types.step import SequencePlan


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a step, with its state."""

    plan: SequencePlan
    state: SequenceState

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.plan.start + self.plan.num_tokens

    @property
    def num_prompt_rows(self) -> int:
        """Positions whose logits score the next prompt token; 0 unless prompt logprobs were asked for."""
        if self.state.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(self.end, self.state.num_prompt_tokens - 1) - self.plan.start)

    @property
    def num_rows(self) -> int:
        """Rows of logits that this part needs: those of the prompt, then the one to sample from."""
        return self.num_prompt_rows + self.plan.num_samples


def forward_batch(parts: Sequence[Part], block_size: int) -> ForwardBatch:
    """Builds the arrays for `parts`, at least one.

    Raises:
        EngineError: a part does not fit what the runner knows of its sequence.
    """
    for part in parts:
        _check(part, block_size)
    lengths = np.array([part.plan.num_tokens for part in parts], np.int32)
    starts = np.array([part.plan.start for part in parts], np.int32)
    query_starts = np.zeros(len(parts) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], lengths)
    return ForwardBatch(
        token_ids=np.concatenate([part.state.tokens.view[part.plan.start : part.end] for part in parts]),
        positions=positions,
        query_starts=query_starts,
        context_lens=starts + lengths,
        block_tables=_block_tables(parts, block_size),
        logit_rows=_logit_rows(parts, query_starts),
    )


def _block_tables(parts: Sequence[Part], block_size: int) -> IntArray:
    counts = [_num_blocks(part.end, block_size) for part in parts]
    tables = np.zeros((len(parts), max(counts)), np.int32)
    for row, part, count in zip(tables, parts, counts, strict=True):
        row[:count] = part.state.blocks.view[:count]
    return tables


def _logit_rows(parts: Sequence[Part], query_starts: IntArray) -> IntArray:
    """Lists, part by part, the tokens whose logits are wanted."""
    if not any(part.num_prompt_rows for part in parts):
        sampled = np.array([part.plan.num_samples for part in parts], bool)
        return np.compress(sampled, query_starts[1:]) - np.int32(1)
    rows: list[int] = []
    for part, start, end in zip(parts, query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True):
        rows += range(start, start + part.num_prompt_rows)
        rows += [end - 1] * part.plan.num_samples
    return np.array(rows, np.int32)


def _check(part: Part, block_size: int) -> None:
    plan, state = part.plan, part.state
    if plan.num_tokens < 1 or plan.start < 0 or part.end > len(state.tokens):
        raise EngineError(f"the step plan asks for positions of sequence {plan.seq_id} that have no token yet")
    if plan.num_samples not in (0, 1) or plan.parents is not None:
        raise EngineError("this runner verifies no drafts: a part samples at most one token and has no parents")
    if plan.num_samples and part.end != len(state.tokens):
        raise EngineError(f"the step plan samples sequence {plan.seq_id} before its last token")
    if len(state.blocks) < _num_blocks(part.end, block_size):
        raise EngineError(f"the block table of sequence {plan.seq_id} ends before its tokens do")


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
