"""Runs steps of sequences that generate tokens. Steps with and without drafts share one code path: without, the drafts are
empty.

The program chooses the tokens, unless a request needs logits on the host (log-probabilities, penalties, biases); then they are
sampled here from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.backends.base import GREEDY, Capability, FloatArray, ForwardBatch, IntArray, MaskArray, Program, StepOutput, Wants
from cloister.executor.drafter_group import DrafterGroup
from cloister.executor.drafters import NOTHING, HiddenRows, VerifyFeedback
from cloister.executor.grammar import DRAFT_MASKS_S, MaskWait
from cloister.executor.inputs import ScheduledSequence, TableLayout, forward_batch, row_slices, split_scored
from cloister.executor.logprobs import prompt_logprobs, sample_logprobs
from cloister.executor.program_executor import ProgramExecutor
from cloister.executor.sampling import NOT_FINITE, finite_rows, greedy_tokens
from cloister.executor.sampling_time import SamplingTime
from cloister.executor.state import BatchState, SequenceState
from cloister.executor.verification import Verification, accept_drawn
from cloister.types.clock import Clock
from cloister.types.errors import EngineError
from cloister.types.step import Fork, Sample, StepResult

BoolArray = npt.NDArray[np.bool_]
_NOBODY: Final[AbstractSet[int]] = frozenset()


class TokenGenerator:
    """Runs the steps of sequences that sample, or will sample after their prompt.

    Args:
        batch: the sequences of the runner.
        drafting: called with forks, and with the model's output of steps that it observes.
        tables: layout of block tables.
        clock: measures how long masks behind drafts take.
        masks: how long a step waits for masks.
        sampling_time: counts the time of what requests ask of sampling.

    Attributes:
        may_repeat: a sequence may compute its last position again, so that it may get its token in a later step.
    """

    def __init__(
        self,
        program: Program,
        batch: BatchState,
        drafting: DrafterGroup,
        *,
        vocab_size: int,
        tables: TableLayout,
        clock: Clock,
        masks: MaskWait,
        sampling_time: SamplingTime,
    ) -> None:
        self._clock, self._sampling_time = clock, sampling_time
        self._masks = masks
        self._program = program
        self._executor = ProgramExecutor(program, vocab_size, sampling_time)
        self._batch = batch
        self._tables = tables
        self._drafting = drafting
        self._drafts = len(drafting) > 0
        self._shows_every = drafting.wants_every_hidden and Capability.EVERY_HIDDEN in program.capabilities
        # A state goes on with each position, and so do drafters that read all of them: neither can take one twice.
        self.may_repeat = tables.state_group is None and not self._shows_every
        self._draft_masks_left_s = DRAFT_MASKS_S
        self._can_show_hidden = drafting.wants_hidden and Capability.HIDDEN in program.capabilities

    def start(self, live: list[ScheduledSequence], forks: list[Fork], result: StepResult) -> Callable[[], None] | None:
        """Starts a step and adds its outputs to `result`. Returns a function that waits for it, or None if the step is
        complete.

        Only a step without drafts and forks, on a device that chooses the tokens, continues after this returns.

        Args:
            live: the sequences that have not failed.
        """
        if not live:
            self._open_verifications([], forks, {})
            return None
        watched = self._find_watched(live, forks) if self._drafts else _NOBODY
        reads_logits = (watched or self._batch.num_processed) and self._reads_logits(live, watched)
        if not (reads_logits or watched or forks or self._shows_every):
            return self._start_plain(live, result)
        if not reads_logits:
            seen = self._verify_on_program(live, forks, watched, result)
        else:
            seen, runs = [], split_scored(live)
            run_of = {part.plan.seq_id: number for number, run in enumerate(runs) for part in run}
            for number, run in enumerate(runs):
                own = [fork for fork in forks if run_of.get(fork.parent_id, 0) == number]
                seen += self._run_from_logits(run, own, watched, result)
        if seen:
            self._drafting.observe(seen)
        return None

    def _find_watched(self, live: Sequence[ScheduledSequence], forks: Sequence[Fork]) -> AbstractSet[int]:
        """Returns the sequences whose output drafters observe in this step; empty if drafters take no part in it."""
        plans = [part.plan for part in live]
        if not self._drafting.wants(plans):
            return _NOBODY
        watched = {plan.seq_id for plan in plans if plan.is_watched or plan.num_drafts}
        return watched | {fork.child_id for fork in forks if fork.parent_id in watched}

    def _reads_logits(self, live: Sequence[ScheduledSequence], watched: AbstractSet[int]) -> bool:
        """Whether some token cannot be chosen by the program."""
        if self._batch.num_processed and False in [part.state.is_unprocessed for part in live]:
            return True
        # sampled drafts need randomised acceptance, and a grammar must advance token by token through a draft
        return bool(watched) and any(
            part.state.grammar is not None or (part.draft.probs is not None and not part.state.is_coupled) for part in live
        )

    def _open_verifications(
        self, parts: Sequence[ScheduledSequence], forks: Sequence[Fork], rows: Mapping[int, slice]
    ) -> list[Verification]:
        """Returns a verification for each sequence that samples, then one for each forked child."""
        found = {}
        for part in parts:
            if part.plan.num_samples:
                root = rows[part.plan.seq_id].start + part.num_prompt_rows
                found[part.plan.seq_id] = Verification(part.state, part.draft, root)
        children = []
        for fork in forks:
            child = self._batch.fork(fork.parent_id, fork.child_id, fork.index)
            if child.failure is None and fork.parent_id not in found and not child.is_late:
                raise EngineError(f"sequence {fork.parent_id} forks in a step in which it does not sample")
            self._drafting.fork(fork.parent_id, fork.child_id)
            if fork.parent_id in found:
                children.append(Verification(child, NOTHING, found[fork.parent_id].root))
        return [each for each in (*found.values(), *children) if each.state.failure is None]

    def _finish(self, parts: Sequence[ScheduledSequence], verified: Sequence[Verification], result: StepResult) -> None:
        self._keep_paths(parts, verified)
        if self._tables.state_group is not None and any(part.draft is not NOTHING for part in parts):
            self._program.accept_drafts(self._accepted(parts, verified))
        result.samples += [each.sample for each in verified if each.token_ids and each.state.failure is None]

    def _keep_paths(self, parts: Sequence[ScheduledSequence], verified: Sequence[Verification]) -> None:
        """Moves the KV of accepted drafts to the positions of a chain."""
        trees = {part.plan.seq_id: part for part in parts if part.draft.parents is not None}
        size, num_groups, moves = self._tables.block_size, self._tables.num_groups, []
        groups = [group for group in range(num_groups) if group != self._tables.state_group]
        for each in verified if trees else ():
            part, slots = trees.get(each.state.seq_id), each.state.blocks
            for move in each.moves(part) if part is not None else ():
                moves += [[slots[p // size * num_groups + group] * size + p % size for p in move] for group in groups]
        if moves:
            self._program.move_positions(np.array(moves, np.int32))

    def _accepted(self, parts: Sequence[ScheduledSequence], verified: Sequence[Verification]) -> IntArray:
        """Returns the token of the batch and the block of the state of each accepted draft (`Program.accept_drafts`)."""
        paths = {each.state.seq_id: each.path for each in verified}
        accepted, first = [], 0
        for part in parts:
            first += part.end - part.plan.start
            block = self._tables.running_state(part)
            accepted += [(first + place, block) for place in paths.get(part.plan.seq_id, ())]
            first += len(part.draft.token_ids)
        return np.array(accepted, np.int32).reshape(-1, 2)

    # Tokens chosen by the program

    def _start_plain(self, live: Sequence[ScheduledSequence], result: StepResult) -> Callable[[], None] | None:
        """Starts a step without verification; creating an object for each sequence would take a tenth of its Python time."""
        batch = forward_batch(live, self._tables)
        states = [part.state for part in live if part.plan.num_samples]
        wants = self._wants(batch, states)
        if not self._executor.is_asynchronous:
            output = self._executor.step(batch, wants)
            if wants.masks is None:
                _append(states, output, batch, result)
            else:
                self._append_guided(states, output, batch, result)
            return None
        wait = self._executor.launch(batch, wants)
        append = _append if wants.masks is None else self._append_guided
        return lambda: append(states, wait(), batch, result)

    def _append_guided(self, states: list[SequenceState], output: StepOutput, batch: ForwardBatch, result: StepResult) -> None:
        with self._sampling_time:  # grammars follow their tokens
            _append(states, output, batch, result)

    def _verify_on_program(
        self, live: Sequence[ScheduledSequence], forks: Sequence[Fork], watched: AbstractSet[int], result: StepResult
    ) -> list[VerifyFeedback]:
        batch = forward_batch(live, self._tables)
        verified = self._open_verifications(live, forks, row_slices(live))
        states = []
        rows: list[int] = []
        depths: list[int] = []
        for each in verified:
            count = 1 + len(each.draft.token_ids)
            states += [each.state] * count
            rows += range(each.root, each.root + count)
            depths += each.draft.depths
        positions = np.array([len(state.tokens) for state in states], np.int32) + np.array(depths, np.int32)
        nodes = np.array(rows, np.int32), positions
        wants = self._wants(batch, states, nodes, watched, shows_hidden=self._shows(live, watched))
        output = self._executor.step(batch, wants)
        every = self._take_every(batch, output)
        if wants.greedy:
            output.tokens = output.tokens[rows]
        if output.tokens.shape != (len(states),):
            raise EngineError(f"the program returned tokens of shape {output.tokens.shape}")
        tokens, first, seen = output.tokens.tolist(), 0, []
        for each in verified:
            own = slice(first, first + 1 + len(each.draft.token_ids))
            if each.state.grammar is not None and each.state.grammar.is_late:
                result.deferred.add(each.state.seq_id)
            else:
                each.follow(tokens[own])
            if each.token_ids and each.state.seq_id in watched:
                seen.append(each.feedback(output.tokens[own], output))
            first = own.stop
        self._finish(live, verified, result)
        self._pass_hidden(live, forks, verified, every)
        return seen

    def _take_every(self, batch: ForwardBatch, output: StepOutput) -> FloatArray | None:
        """Returns the hidden states of all tokens where drafters read them, and leaves those of the rows in `output`."""
        if not self._shows_every:
            return None
        every, output.hidden = output.hidden, output.hidden[batch.logit_rows]
        return every

    def _pass_hidden(
        self,
        parts: Sequence[ScheduledSequence],
        forks: Sequence[Fork],
        verified: Sequence[Verification],
        every: FloatArray | None,
    ) -> None:
        """Passes the hidden states of a step's tokens to the drafters that read all of them.

        Args:
            every: [num_tokens, hidden], in the order of the step's batch.
        """
        if every is None:
            return
        first, found = 0, []
        paths = {each.state.seq_id: each.path for each in verified}
        children: dict[int, list[SequenceState]] = {}
        for fork in forks:
            children.setdefault(fork.parent_id, []).append(self._batch[fork.child_id])
        for part in parts:
            start, end = part.plan.start, first + part.end - part.plan.start
            own = [*range(first, end), *(end + place for place in paths.get(part.plan.seq_id, ()))]
            found.append(HiddenRows(part.state, start, every[own]))
            found += [HiddenRows(child, start, every[first:end]) for child in children.get(part.plan.seq_id, ())]
            first = end + len(part.draft.token_ids)
        self._drafting.keep_hidden([each for each in found if each.state.failure is None])
        for rows in (every, *(each.rows for each in found)):
            rows.fill(0)  # drafters keep copies

    def _shows(self, live: Sequence[ScheduledSequence], watched: AbstractSet[int]) -> bool:
        """Whether drafters need hidden states of a step."""
        return self._can_show_hidden and bool(watched) and any(part.plan.is_watched for part in live)

    def _wants(
        self,
        batch: ForwardBatch,
        states: list[SequenceState],
        nodes: tuple[IntArray, IntArray] | None = None,
        watched: AbstractSet[int] = _NOBODY,
        *,
        shows_hidden: bool = False,
    ) -> Wants:
        """Returns the requested outputs of a step in which the program chooses a token for each of `states`.

        If all are greedy, only the most likely token of every row. Grammar masks are computed while the program runs, so they
        are requested afterwards.

        Args:
            nodes: for each, its row of logits and the token's position; None if each has one row, in order.
        """
        num_top = self._drafting.num_top if watched else 0
        shows_hidden, shows_any = shows_hidden and not self._shows_every, shows_hidden or self._shows_every
        if not num_top and (self._batch.num_not_greedy == 0 or False not in [state.is_greedy for state in states]):
            return Wants(greedy=True, hidden=shows_hidden, every_hidden=self._shows_every) if shows_any else GREEDY
        if nodes is not None:
            sampling = self._batch.sampling_metadata(states, *nodes)
        else:
            positions = batch.context_lens if len(states) == len(batch.context_lens) else None
            sampling = self._batch.sampling_metadata(states, np.arange(len(states), dtype=np.int32), positions)
        masks = None
        if self._batch.num_guided and not all(state.grammar is None for state in states):
            masks = partial(self._stack_masks, states)
        return Wants(sampling=sampling, masks=masks, num_top=num_top, hidden=shows_hidden, every_hidden=self._shows_every)

    # Tokens sampled from logits

    def _run_from_logits(
        self, run: Sequence[ScheduledSequence], forks: Sequence[Fork], watched: AbstractSet[int], result: StepResult
    ) -> list[VerifyFeedback]:
        rows = row_slices(run)
        batch = forward_batch(run, self._tables)
        wants = Wants(
            logits=True,
            num_top=self._drafting.num_top if watched else 0,
            hidden=self._shows(run, watched) and not self._shows_every,
            every_hidden=self._shows_every,
        )
        output = self._executor.step(batch, wants)
        every = self._take_every(batch, output)
        with self._sampling_time:
            verified = self._sample_from_logits(run, forks, rows, output, result)
        self._finish(run, verified, result)
        self._pass_hidden(run, forks, verified, every)
        return _see([each for each in verified if each.state.seq_id in watched], output)

    def _sample_from_logits(
        self,
        run: Sequence[ScheduledSequence],
        forks: Sequence[Fork],
        rows: dict[int, slice],
        output: StepOutput,
        result: StepResult,
    ) -> list[Verification]:
        finite = finite_rows(output.logits)
        for part in run:
            first = rows[part.plan.seq_id].start
            if not finite[first : first + part.num_prompt_rows + part.plan.num_samples].all():
                part.state.failure = NOT_FINITE
        result.prompt_logprobs |= prompt_logprobs([part for part in run if part.num_prompt_rows], rows, output.logits)
        verified = self._open_verifications(run, forks, rows)
        self._draft_masks_left_s = DRAFT_MASKS_S
        going = verified
        if self._batch.num_guided:
            self._wait_for_masks([each.state for each in verified])
            going = [each for each in verified if not each.state.is_late]
            result.deferred |= {each.state.seq_id for each in verified if each.state.is_late}
        while going:
            going = self._advance(going, output.logits, finite)
        return verified

    def _advance(self, going: list[Verification], logits: FloatArray, finite: BoolArray) -> list[Verification]:
        """Samples one more token for each verification; returns those that continue because a draft matches the token."""
        for each in going:
            if not finite[each.row]:
                each.state.failure = NOT_FINITE
        going = [each for each in going if each.state.failure is None]
        if not going:
            return []
        states, rows = [each.state for each in going], [each.row for each in going]
        sampling = self._batch.sampling_metadata(states, rows)
        tokens = np.empty(len(going), np.int64)
        children: list[int | None] = [None] * len(going)
        coupled = [place for place, each in enumerate(going) if each.is_coupled]
        if coupled:
            own = [states[place] for place in coupled]
            tokens[coupled] = self._executor.process_and_sample(logits, own, sampling[coupled])
            for place in coupled:
                children[place] = going[place].child_of(int(tokens[place]))
        if len(coupled) < len(going):
            drawn = sorted(set(range(len(going))).difference(coupled))
            found = accept_drawn([going[place] for place in drawn], logits[[rows[place] for place in drawn]], sampling[drawn])
            for place, (child, token) in zip(drawn, found, strict=True):
                children[place], tokens[place] = child, token
        entries = sample_logprobs(states, rows, logits, tokens)
        chosen = zip(going, tokens.tolist(), children, strict=True)
        going_on = []
        for place, (each, token, child) in enumerate(chosen):
            if each.state.grammar is None:
                goes_on = each.accept(token, child, entries.get(place))
            else:
                began_s = self._clock.now()
                each.has_time = self._draft_masks_left_s > 0.0
                goes_on = each.accept(token, child, entries.get(place))
                self._draft_masks_left_s -= self._clock.now() - began_s if goes_on else 0.0
            if goes_on:
                going_on.append(each)
        return going_on

    # Masks of grammars

    def _wait_for_masks(self, states: Sequence[SequenceState]) -> None:
        """Waits for masks, for a bounded time where sequences may compute a position again; elsewhere those that are late were
        left out of the step."""
        guided = [state.grammar for state in states if state.grammar is not None]
        self._masks.wait(guided, may_defer=self.may_repeat)

    def _stack_masks(self, states: list[SequenceState]) -> MaskArray:
        """Returns the token mask of each sequence, [len(states), num_words]; all ones for one without a grammar, or whose mask
        is late."""
        with self._sampling_time:
            return self._stack(states)

    def _stack(self, states: list[SequenceState]) -> MaskArray:
        self._wait_for_masks(states)
        masks = [None if state.grammar is None or state.is_late else state.grammar.mask() for state in states]
        if len(masks) == 1 and masks[0] is not None:
            return masks[0][None]
        num_words = next(state.grammar.num_words for state in states if state.grammar is not None)
        stacked = np.full((len(masks), num_words), 0xFFFFFFFF, np.uint32)
        for row, mask in enumerate(masks):
            if mask is not None:
                stacked[row] = mask
        return stacked


def _append(states: list[SequenceState], output: StepOutput, batch: ForwardBatch, result: StepResult) -> None:
    """Adds to each sequence the token that the program chose from its row; -1 means that there is none."""
    if output.tokens.shape != batch.logit_rows.shape:
        raise EngineError(f"the program returned tokens of shape {output.tokens.shape}")
    samples = result.samples = []
    for state, token in zip(states, output.tokens.tolist(), strict=True):
        if state.grammar is not None and state.grammar.is_late:
            result.deferred.add(state.seq_id)
            continue
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


def _see(verified: Sequence[Verification], output: StepOutput) -> list[VerifyFeedback]:
    """Returns the feedback for drafters of a step with logits; off the accepted path it uses the most likely tokens."""
    verified = [each for each in verified if each.token_ids and each.state.failure is None]
    if not verified:
        return []
    best, seen = greedy_tokens(output.logits), []
    for each in verified:
        chosen = best[each.root : each.root + 1 + len(each.draft.token_ids)].copy()
        chosen[[0, *[place + 1 for place in each.path]]] = each.token_ids
        seen.append(each.feedback(chosen, output))
    return seen
