"""Drafts chains token by token with a small model, for many sequences at once (Leviathan et al. 2023, 2.1)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.backends.base import (
    KV_ONLY,
    LOGITS,
    FloatArray,
    ForwardBatch,
    IntArray,
    Program,
    SamplingMetadata,
    StepOutput,
    Wants,
)
from cloister.executor.acceptance import distribution, draw_from
from cloister.executor.arrays import as_ints, block_tables
from cloister.executor.drafters.base import NOTHING, Draft
from cloister.executor.noise import Domain, UniformArray, noise_keys, uniforms
from cloister.executor.program_executor import ProgramExecutor
from cloister.executor.state import SequenceState


@dataclass(slots=True, repr=False)
class Stretch:
    """Positions of one sequence that a small model computes, with or without its last known token.

    Attributes:
        blocks: the small model's block table, up to the end of the computed and drafted tokens.
        start: position of the first token.
        tokens: the tokens from there on.
        num_drafts: number of tokens to draft after them; 0 computes KV only.
        hidden: [len(tokens), hidden], what each token brings beside its embedding, for a module that merges both
            (`DecoderSpec.merges_hidden`); its drafts bring the hidden states of the drafts before them.
    """

    state: SequenceState
    blocks: array[int]
    start: int
    tokens: array[int]
    num_drafts: int = 0
    is_coupled: bool = True
    hidden: FloatArray | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Stretch(start={self.start}, num_tokens={len(self.tokens)}, num_drafts={self.num_drafts})"


def stretch_batch(stretches: Sequence[Stretch], block_size: int) -> ForwardBatch:
    """Builds the arrays that compute the tokens of stretches, a row of logits for each that drafts.

    Block tables include the positions of drafts.
    """
    token_ids, positions, context_lens, logit_rows = array("i"), array("i"), array("i"), array("i")
    query_starts = array("i", (0,))
    width = max([-(-(each.end + max(each.num_drafts - 1, 0)) // block_size) for each in stretches])
    for each in stretches:
        token_ids += each.tokens
        end = each.start + len(each.tokens)
        positions.extend(range(each.start, end))
        context_lens.append(end)
        query_starts.append(len(token_ids))
        if each.num_drafts:
            logit_rows.append(len(token_ids) - 1)
    return ForwardBatch(
        token_ids=as_ints(token_ids),
        positions=as_ints(positions),
        query_starts=as_ints(query_starts),
        context_lens=as_ints(context_lens),
        block_tables=block_tables([each.blocks for each in stretches], width),
        logit_rows=as_ints(logit_rows),
        hidden=_join_hidden(stretches),
    )


def _join_hidden(stretches: Sequence[Stretch]) -> FloatArray | None:
    parts = [each.hidden for each in stretches if each.hidden is not None]
    return np.concatenate(parts) if parts else None


class ChainGrower:
    """Drafts chains with one program.

    Args:
        draws: how the next token of each sequence is sampled (`DrafterContext.sampling_metadata`).
    """

    def __init__(
        self,
        program: Program,
        vocab_size: int,
        block_size: int,
        draws: Callable[[list[SequenceState], list[int]], SamplingMetadata],
    ) -> None:
        self._executor = ProgramExecutor(program, vocab_size)
        self._block_size = block_size
        self._draws = draws

    def compute(self, stretches: Sequence[Stretch]) -> None:
        """Computes the KV of stretches without drafting."""
        if stretches:
            self._executor.step(stretch_batch(stretches, self._block_size), KV_ONLY)

    def grow(self, stretches: Sequence[Stretch]) -> list[Draft]:
        """Drafts after each stretch, at least one token each.

        KV is written for all but the last draft.
        """
        order = sorted(range(len(stretches)), key=lambda place: -stretches[place].num_drafts)
        longest = [stretches[place] for place in order]
        apart: dict[int, list[FloatArray]] = {row: [] for row, each in enumerate(longest) if not each.is_coupled}
        columns = [tokens.tolist() for tokens in self._grow(longest, apart)]
        drafts = [NOTHING] * len(longest)
        for row, place in enumerate(order):
            each = longest[row]
            drafts[place] = _draft(each, [column[row] for column in columns[: each.num_drafts]], apart.get(row))
        return drafts

    def _grow(self, longest: Sequence[Stretch], apart: dict[int, list[FloatArray]]) -> Iterator[IntArray]:
        """Yields the tokens at each depth, for the sequences whose drafts are that long: they are sorted longest first.

        Args:
            apart: rows whose tokens are drawn with independent noise; receives the distribution of each token.
        """
        num_live = len(longest)
        batch = stretch_batch(longest, self._block_size)
        draws = self._draws([each.state for each in longest], list(range(num_live)))
        numbers = _numbers(draws[list(apart)], longest[0].num_drafts) if apart else None
        for depth in range(1, longest[0].num_drafts + 1):
            if numbers is None:
                output = self._executor.step(batch, Wants(sampling=draws, hidden=batch.hidden is not None))
            else:
                output = self._draw_apart(batch, draws, apart, numbers[depth - 1])
            tokens = output.tokens
            yield tokens
            while num_live and longest[num_live - 1].num_drafts <= depth:
                num_live -= 1
            if num_live:
                batch = _next_batch(batch, output, num_live) if depth > 1 else _first_batch(batch, output, num_live)
                draws = draws[:num_live]
                draws["position"] += 1

    def _draw_apart(
        self, batch: ForwardBatch, draws: SamplingMetadata, apart: dict[int, list[FloatArray]], numbers: UniformArray
    ) -> StepOutput:
        """Computes a step and chooses tokens; those of the rows `apart` are drawn with independent numbers."""
        output = self._executor.step(batch, LOGITS if batch.hidden is None else Wants(logits=True, hidden=True))
        logits = output.logits
        tokens = np.empty(len(draws), np.int32)
        coupled = [row for row in range(len(draws)) if row not in apart]
        if coupled:
            tokens[coupled] = self._executor.sample(logits, draws[coupled])
        drawn = [row for row in apart if row < len(draws)]
        if drawn:
            probs = distribution(logits[drawn], draws[drawn])
            tokens[drawn] = draw_from(probs, numbers[: len(drawn)])
            for row, found in zip(drawn, probs, strict=True):
                apart[row].append(found)
        output.tokens = tokens
        return output


def draft_numbers(
    draws: SamplingMetadata, depths: Sequence[int] | IntArray, ordinals: Sequence[int] | IntArray
) -> UniformArray:
    """Returns the noise of independently drawn drafts: one number for each draw, uniform in [0, 1).

    Verification does not use them, and draws at one position differ.

    They also differ by depth: the token after a rejected draft is drawn again at a smaller depth in a later step. Whether this
    happens may depend on the first draw, because drafts that end early are requested less often; with the same number the
    second draw would not follow its distribution.
    """
    keys = noise_keys(draws["seed"], draws["index"], draws["position"])
    return uniforms(keys, Domain.DRAFT, (np.asarray(depths, np.int64) << 16) + np.asarray(ordinals, np.int64))


def _numbers(draws: SamplingMetadata, num_drafts: int) -> UniformArray:
    """Returns the numbers for drawing chains, [num_drafts, num_draws], in one call, because a call costs as much as a token."""
    repeated = np.tile(draws, num_drafts)
    depths = np.repeat(np.arange(num_drafts, dtype=np.int32), len(draws))
    repeated["position"] += depths
    return draft_numbers(repeated, depths, [0] * len(repeated)).reshape(num_drafts, len(draws))


def _first_batch(batch: ForwardBatch, output: StepOutput, num_live: int) -> ForwardBatch:
    """Returns the batch that computes the first draft of each sequence; its arrays may be written."""
    return ForwardBatch(
        token_ids=_feedable(output.tokens[:num_live]),
        positions=batch.context_lens[:num_live].copy(),
        query_starts=np.arange(num_live + 1, dtype=np.int32),
        context_lens=batch.context_lens[:num_live] + np.int32(1),
        block_tables=batch.block_tables[:num_live],
        logit_rows=np.arange(num_live, dtype=np.int32),
        hidden=None if batch.hidden is None else output.hidden[:num_live],
    )


def _next_batch(batch: ForwardBatch, output: StepOutput, num_live: int) -> ForwardBatch:
    """Returns the batch that computes the next draft of each sequence, in the arrays of the previous one."""
    batch.positions[:] += 1
    batch.context_lens[:] += 1
    return ForwardBatch(
        token_ids=_feedable(output.tokens[:num_live]),
        positions=batch.positions[:num_live],
        query_starts=batch.query_starts[: num_live + 1],
        context_lens=batch.context_lens[:num_live],
        block_tables=batch.block_tables[:num_live],
        logit_rows=batch.logit_rows[:num_live],
        hidden=None if batch.hidden is None else output.hidden[:num_live],
    )


def _feedable(tokens: IntArray) -> IntArray:
    """Returns valid input tokens: a chain without a token to choose ends there, and the rest is cut off."""
    return tokens if tokens.min() >= 0 else np.maximum(tokens, 0)


def _draft(stretch: Stretch, tokens: list[int], probs: list[FloatArray] | None) -> Draft:
    """Returns a chain up to the first token that could not be chosen, or that ends its sequence."""
    stops = stretch.state.stops
    for place, token in enumerate(tokens):
        if token < 0 or token in stops:
            tokens = tokens[: place + (token >= 0)]
            break
    return Draft(tokens, None, np.stack(probs[: len(tokens)]) if probs and tokens else None)
