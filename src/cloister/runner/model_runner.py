"""Runs one plan after another on a program."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from cloister.backends.base import (
    BufferedProgram,
    DrawArray,
    DrawingProgram,
    FloatArray,
    ForwardBatch,
    GreedyProgram,
    HiddenProgram,
    MaskArray,
    MaskingProgram,
    Program,
    TreeProgram,
)
from cloister.runner.drafter_group import DrafterGroup
from cloister.runner.drafters import NOTHING, Drafter
from cloister.runner.drawing import ProgramSampler
from cloister.runner.grammar import Grammars
from cloister.runner.inputs import Part, forward_batch, make_part, row_slices, split_scored
from cloister.runner.pooling import NOT_OFFERED, pool_parts
from cloister.runner.sampling import Sampler, best_tokens, finite_rows
from cloister.runner.scoring import NOT_FINITE, NOTHING_LEFT, prompt_logprobs, sample_logprobs
from cloister.runner.state import BatchState, SequenceState
from cloister.runner.verification import DraftVerifier
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import EngineError
from cloister.types.request import Embedding
from cloister.types.step import Fork, Sample, SequencePlan, StepPlan, StepResult


class ModelRunner:
    """Keeps the tokens of running sequences and turns plans into results. Not thread-safe: one step at a time.

    Args:
        program: what computes, with its KV cache.
        vocab_size: columns of its logits.
        max_model_len: prompt and answer together, in tokens.
        block_size: positions in one KV block.
        adapters: digest -> slot of the program's adapters; may change between steps.
        grammars: compiles those that sequences bring; None fails such sequences.
        drafters: by the name that plans know them by; None where no plan drafts.
    """

    def __init__(
        self,
        program: Program,
        *,
        vocab_size: int,
        max_model_len: int,
        block_size: int,
        clock: Clock | None = None,
        adapters: Mapping[str, int] = {},
        grammars: Grammars | None = None,
        drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        self._program = program
        self._greedy = program if isinstance(program, GreedyProgram) else None
        self._drawing = program if isinstance(program, DrawingProgram) else None
        self._masking = program if isinstance(program, MaskingProgram) else None
        self._buffered = program if isinstance(program, BufferedProgram) else None
        self._hidden = program if isinstance(program, HiddenProgram) else None
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._clock = clock or WallClock()
        self._grammars = grammars
        self._batch = BatchState(vocab_size=vocab_size, max_model_len=max_model_len, adapters=adapters, grammars=grammars)
        self._sampler = Sampler(vocab_size) if self._drawing is None else ProgramSampler(self._drawing)
        self._drafts = bool(drafters)
        self._drafting = DrafterGroup(drafters or {}, self._clock, takes_trees=isinstance(program, TreeProgram))
        self._verifier = DraftVerifier(program, self._batch, self._sampler, self._drafting, block_size=block_size)

    def draws(self, states: list[SequenceState], rows: list[int]) -> DrawArray:
        """Says how the next token of each sequence is chosen, for drafters that choose as the model does (`DraftingPlace`)."""
        return self._batch.draws(states, rows)

    def wipe_buffers(self) -> None:
        """Overwrites what the program's buffers hold of the steps so far, those of sequences that go on included."""
        if self._buffered is not None:
            self._buffered.wipe_buffers()
        self._drafting.wipe_buffers()

    @property
    def num_sequences(self) -> int:
        """Sequences held."""
        return len(self._batch)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step, in the order that `StepPlan` states.

        A step that leaves no sequence also wipes what the program's buffers still hold of them.

        Raises:
            EngineError: the plan does not fit what the runner holds. After this, or an error of the program, the step's
                sequences must depart before they are named again; the others are unharmed.
        """
        started_s = self._clock.now()
        for seq_id in plan.departures:
            self._batch.depart(seq_id)
            self._drafting.forget(seq_id)
        for new in plan.arrivals:
            self._batch.arrive(new)
        if plan.wipes:
            self._program.wipe_blocks(plan.wipes)
            self._drafting.wipe_blocks(plan.wipes)
        if plan.copies:
            self._program.copy_blocks(plan.copies)
            self._drafting.copy_blocks(plan.copies)
        if not (plan.sequences or self.num_sequences):
            self.wipe_buffers()
        result = StepResult(plan_id=plan.plan_id)
        self._compute(plan, result)
        if self._drafts:
            result.draft_s = self._drafting.take_times()
        result.elapsed_s = self._clock.now() - started_s
        return result

    def _compute(self, plan: StepPlan, result: StepResult) -> None:
        parts = [self._part(part) for part in plan.sequences]
        if self._drafts:
            parts = self._drafted(parts)
        everyone = self._batch
        live = [part for part in parts if part.state.failure is None]
        if everyone.num_pooled:
            result.embeddings = self._pool([part for part in live if part.state.pool is not None])
            live = [part for part in live if part.state.pool is None]
        if self._drafts and self._drafting.wants([part.plan for part in live]):
            self._verify(live, plan.forks, result)
        elif live and not plan.forks and (everyone.num_not_plain == 0 or False not in [part.state.is_plain for part in live]):
            result.samples = self._take_best(live)
        elif (
            live
            and self._drawing is not None
            and (not everyone.num_guided or self._can_mask(live))
            and (everyone.num_not_bare == 0 or False not in [part.state.is_bare for part in live])
        ):
            result.samples = self._take_drawn(self._drawing, live, plan.forks)
        else:
            runs = split_scored(live)
            run_of = {part.plan.seq_id: number for number, run in enumerate(runs) for part in run}
            for number, run in enumerate(runs):
                self._score(run, [fork for fork in plan.forks if run_of.get(fork.parent_id, 0) == number], result)
        touched = [part.state for part in parts]
        touched += [self._batch[fork.child_id] for fork in plan.forks]
        if self._batch.num_guided:
            self._follow_grammars([state for state in touched if state.grammar is not None], result)
        result.failures = {state.seq_id: state.failure for state in touched if state.failure is not None}

    def _drafted(self, parts: list[Part]) -> list[Part]:
        """Returns the parts with what is drafted for them."""
        asks = [(part.plan, part.state) for part in parts if part.state.failure is None and part.state.pool is None]
        self._drafting.follow(asks)
        drafts = self._drafting.draft(asks)
        return [make_part(part.plan, part.state, drafts.get(part.plan.seq_id, NOTHING)) for part in parts] if drafts else parts

    def _verify(self, live: list[Part], forks: list[Fork], result: StepResult) -> None:
        """Computes a step in which drafts are verified, or drafters watch."""
        seen = self._verifier.run(live, forks, result)
        self._drafting.observe(seen)

    def _pool(self, parts: list[Part]) -> dict[int, Embedding]:
        """Computes the sequences of a step that are pooled, apart from the others: they read hidden states, not logits."""
        if self._hidden is None:
            for part in parts:
                part.state.failure = NOT_OFFERED
            return {}
        return pool_parts(self._hidden, parts, self._block_size) if parts else {}

    def _score(self, run: list[Part], forks: list[Fork], result: StepResult) -> None:
        """Computes some sequences of a step: scores prompts, and samples as each sequence wants."""
        rows, logits = self._forward(run)
        states, places = self._draws(run, forks)
        result.prompt_logprobs |= prompt_logprobs([part for part in run if part.num_prompt_rows], rows, logits)
        result.samples += self._sample(states, places, logits)

    def _follow_grammars(self, states: list[SequenceState], result: StepResult) -> None:
        """Says whose grammar is complete, and starts to work out what may follow the tokens of the others."""
        if not states or self._grammars is None:
            return
        sampled = {sample.seq_id for sample in result.samples}
        going_on = []
        for state in states:
            if state.grammar is None or state.seq_id not in sampled:
                continue
            if state.grammar.is_complete:
                result.complete.add(state.seq_id)
            else:
                going_on.append(state.grammar)
        self._grammars.look_ahead(going_on)

    def _part(self, plan: SequencePlan) -> Part:
        state = self._batch[plan.seq_id]
        if plan.new_block_ids or plan.table_start != len(state.blocks):
            if plan.table_start > len(state.blocks):
                raise EngineError(f"the step plan leaves a gap in the block table of sequence {plan.seq_id}")
            state.blocks[plan.table_start :] = array("i", plan.new_block_ids)
        return make_part(plan, state)

    def _take_best(self, live: list[Part]) -> list[Sample]:
        """A step in which every sequence is plain: each one that samples takes its most likely token."""
        tokens = self._best(forward_batch(live, self._block_size))
        return _append([part.state for part in live if part.plan.num_samples], tokens)

    def _take_drawn(self, program: DrawingProgram, live: list[Part], forks: list[Fork]) -> list[Sample]:
        """A step in which every sequence is bare: the program chooses for each one that samples, forked children too.

        What grammars let follow is found while the program computes, so it is asked for after that.
        """
        batch = forward_batch(live, self._block_size)
        if not forks and len(batch.logit_rows) == len(live):  # each samples from one row, and they stand in order
            states = [part.state for part in live]
            draws = self._batch.draws(states, np.arange(len(live), dtype=np.int32), batch.context_lens)
        else:
            states, rows = self._draws(live, forks)
            draws = self._batch.draws(states, rows)
        if self._masking is None or not self._batch.num_guided or all(state.grammar is None for state in states):
            tokens = program.forward_draw(batch, draws)
        else:
            tokens = self._masking.forward_masked(batch, draws, lambda: _stack_masks(states))
        if tokens.shape != (len(states),):
            raise EngineError(f"the program returned tokens of shape {tokens.shape}")
        return _append(states, tokens.tolist())

    def _can_mask(self, live: list[Part]) -> bool:
        """Whether the program can follow the grammars of a step."""
        return self._masking is not None or all(part.state.grammar is None for part in live)

    def _best(self, batch: ForwardBatch) -> list[int]:
        tokens = best_tokens(self._logits(batch)) if self._greedy is None else self._greedy.forward_best(batch)
        if tokens.shape != batch.logit_rows.shape:
            raise EngineError(f"the program returned tokens of shape {tokens.shape}")
        found: list[int] = tokens.tolist()
        return found

    def _logits(self, batch: ForwardBatch) -> FloatArray:
        logits = np.ascontiguousarray(self._program.forward(batch), np.float32)
        if logits.shape != (batch.logit_rows.size, self._vocab_size):
            raise EngineError(f"the program returned logits of shape {logits.shape}")
        return logits

    def _forward(self, live: list[Part]) -> tuple[dict[int, slice], FloatArray]:
        """Returns the rows of logits of each sequence, and the logits [num_rows, vocab]; marks those not finite."""
        if not live:
            return {}, np.zeros((0, self._vocab_size), np.float32)
        logits = self._logits(forward_batch(live, self._block_size))
        rows = row_slices(live)
        finite = finite_rows(logits)
        if not finite.all():
            for part in live:
                if not finite[rows[part.plan.seq_id]].all():
                    part.state.failure = NOT_FINITE
        return rows, logits

    def _draws(self, live: list[Part], forks: list[Fork]) -> tuple[list[SequenceState], list[int]]:
        """Returns each sequence that samples and its row of logits, forked children after their parents' like."""
        ends = accumulate([part.num_rows for part in live])
        draws = [(part.state, end - 1) for part, end in zip(live, ends, strict=True) if part.plan.num_samples]
        if forks:
            row_of = {state.seq_id: row for state, row in draws}
            for fork in forks:
                child = self._batch.fork(fork.parent_id, fork.child_id, fork.index)
                if child.failure is None and fork.parent_id not in row_of:
                    raise EngineError(f"sequence {fork.parent_id} forks in a step in which it does not sample")
                draws.append((child, row_of.get(fork.parent_id, -1)))
        return [state for state, _ in draws if state.failure is None], [row for state, row in draws if state.failure is None]

    def _sample(self, states: list[SequenceState], rows: list[int], logits: FloatArray) -> list[Sample]:
        if not states:
            return []
        tokens = self._sampler.choose(logits, states, self._batch.draws(states, rows))
        logprobs = sample_logprobs(states, rows, logits, tokens)
        samples = []
        for place, (state, token) in enumerate(zip(states, tokens.tolist(), strict=True)):
            if token < 0:
                state.failure = (state.grammar and state.grammar.failure) or NOTHING_LEFT
                continue
            state.append(token)
            if state.failure is None:
                samples.append(Sample(state.seq_id, [token], logprobs.get(place)))
        return samples


def _stack_masks(states: list[SequenceState]) -> MaskArray:
    """Returns what each sequence may choose, [len(states), num_words]; all of it for one without a grammar."""
    masks = [None if state.grammar is None else state.grammar.mask() for state in states]
    if len(masks) == 1 and masks[0] is not None:
        return masks[0][None]
    num_words = next(mask.size for mask in masks if mask is not None)
    stacked = np.full((len(masks), num_words), 0xFFFFFFFF, np.uint32)
    for row, mask in enumerate(masks):
        if mask is not None:
            stacked[row] = mask
    return stacked


def _append(states: list[SequenceState], tokens: list[int]) -> list[Sample]:
    """Gives each bare sequence the token that the program chose; -1 says that its logits were not finite."""
    samples = []
    for state, token in zip(states, tokens, strict=True):
        if token < 0:
            state.failure = (state.grammar and state.grammar.failure) or NOT_FINITE
            continue
        if state.grammar is None:
            state.tokens.append(token)
        else:
            state.append(token)
            if state.failure is not None:
                continue
        samples.append(Sample(state.seq_id, [token]))
    return samples
