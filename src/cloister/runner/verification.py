"""Verifies drafts: one forward over them, then a walk from the last known token as far as the model agrees.

A request with a seed, or a greedy one, gets at each node the very token that it would get without drafts: drawn with the noise
of (seed, index, position), and a draft is accepted if it is that token (rule 6). The same keeps the distribution of every
request whose drafts were not drawn by chance. Where they were, and the request has no seed, `runner.acceptance` decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloister.backends.base import (
    DrawArray,
    DrawingProgram,
    FloatArray,
    HeadProgram,
    IntArray,
    Program,
    TreeProgram,
    WatchedProgram,
)
from cloister.runner.acceptance import accept_child, distribution
from cloister.runner.adjusting import adjusted
from cloister.runner.drafter_group import DrafterGroup
from cloister.runner.drafters import NOTHING, VerifyFeedback
from cloister.runner.drawing import ProgramSampler
from cloister.runner.inputs import Part, forward_batch, row_slices, split_scored
from cloister.runner.noise import Domain, noise_keys, uniforms
from cloister.runner.sampling import Sampler, best_tokens, finite_rows
from cloister.runner.scoring import NOT_FINITE, NOTHING_LEFT, prompt_logprobs, sample_logprobs
from cloister.runner.state import BatchState, SequenceState
from cloister.runner.walk import Walk, follow
from cloister.types.errors import EngineError
from cloister.types.request import TokenLogprobs
from cloister.types.step import Fork, StepResult

BoolArray = npt.NDArray[np.bool_]


class DraftVerifier:
    """Runs the steps in which drafts are verified, or shown what the model says.

    Args:
        batch: the sequences.
        sampler: chooses tokens where the program does not.
        drafting: told of forks; says what drafters want to see.
    """

    def __init__(
        self,
        program: Program,
        batch: BatchState,
        sampler: Sampler | ProgramSampler,
        drafting: DrafterGroup,
        *,
        block_size: int,
    ) -> None:
        self._program = program
        self._drawing = program if isinstance(program, DrawingProgram) else None
        self._watched = program if isinstance(program, WatchedProgram) else None
        self._head = program if isinstance(program, HeadProgram) else None
        self._tree = program if isinstance(program, TreeProgram) else None
        self._batch = batch
        self._sampler = sampler
        self._block_size = block_size
        self._drafting = drafting
        self._wants_hidden = drafting.wants_hidden
        self._num_top = drafting.num_top

    def run(self, live: list[Part], forks: Sequence[Fork], result: StepResult) -> list[VerifyFeedback]:
        """Computes a step, adds its samples to `result`, and returns what drafters are to see of it."""
        if self._chooses_alone(live):
            walks, seen = self._run_bare(live, forks)
        else:
            walks, seen = [], []
            runs = split_scored(live)
            run_of = {part.plan.seq_id: number for number, run in enumerate(runs) for part in run}
            for number, run in enumerate(runs):
                own = [fork for fork in forks if run_of.get(fork.parent_id, 0) == number]
                more_walks, more_seen = self._run_logits(run, own, result)
                walks += more_walks
                seen += more_seen
        self._keep_paths(live, walks)
        result.samples += [walk.sample for walk in walks if walk.token_ids and walk.state.failure is None]
        return seen

    def _chooses_alone(self, live: list[Part]) -> bool:
        """Whether the program can choose every token of a step."""
        if self._drawing is None or (self._num_top and self._watched is None):
            return False
        return all(
            part.state.is_bare and part.state.grammar is None and (part.draft.probs is None or part.state.is_coupled)
            for part in live
        )

    # The program chooses

    def _run_bare(self, live: list[Part], forks: Sequence[Fork]) -> tuple[list[Walk], list[VerifyFeedback]]:
        assert self._drawing is not None
        batch = forward_batch(live, self._block_size)
        walks = self._start(live, forks, row_slices(live))
        states: list[SequenceState] = []
        rows: list[int] = []
        depths: list[int] = []
        for walk in walks:
            count = 1 + len(walk.draft.token_ids)
            states += [walk.state] * count
            rows += range(walk.root, walk.root + count)
            depths += walk.draft.depths
        draws = self._batch.draws(states, rows)
        draws["position"] += np.array(depths, np.int64)
        top = None
        if self._num_top and self._watched is not None:
            tokens, top = self._watched.forward_watched(batch, draws, self._num_top)
        else:
            tokens = self._drawing.forward_draw(batch, draws)
        if tokens.shape != (len(draws),):
            raise EngineError(f"the program returned tokens of shape {tokens.shape}")
        hidden, chosen, first = self._hidden(live), tokens.tolist(), 0
        seen, watched = [], _watched(live, forks)
        for walk in walks:
            end = first + 1 + len(walk.draft.token_ids)
            self._walk_chosen(walk, chosen[first:end])
            if walk.state.seq_id in watched and walk.token_ids:
                seen.append(_see(walk, tokens[first:end], hidden, top))
            first = end
        return walks, seen

    def _walk_chosen(self, walk: Walk, chosen: list[int]) -> None:
        path = follow(walk.draft, chosen, walk.state.stops)
        token_ids = [chosen[0], *[chosen[place + 1] for place in path]]
        if -1 in token_ids:  # as without drafts: what came before a number that is not finite is no answer either
            walk.state.failure = NOT_FINITE
            return
        walk.path += path
        walk.token_ids += token_ids
        walk.state.tokens.extend(token_ids)

    # Logits are wanted

    def _run_logits(
        self, run: list[Part], forks: Sequence[Fork], result: StepResult
    ) -> tuple[list[Walk], list[VerifyFeedback]]:
        rows = row_slices(run)
        logits = self._forward(run)
        finite = finite_rows(logits)
        for part in run:
            first = rows[part.plan.seq_id].start
            if not finite[first : first + part.num_prompt_rows + part.plan.num_samples].all():
                part.state.failure = NOT_FINITE
        result.prompt_logprobs |= prompt_logprobs([part for part in run if part.num_prompt_rows], rows, logits)
        walks = self._start(run, forks, rows)
        hidden = self._hidden(run)
        going = walks
        while going:
            going = self._advance(going, logits, finite)
        return walks, self._show(walks, _watched(run, forks), logits, hidden)

    def _show(
        self, walks: list[Walk], watched: set[int], logits: FloatArray, hidden: FloatArray | None
    ) -> list[VerifyFeedback]:
        """Returns what drafters are to see of a step of which there are logits: off the path, what is most likely."""
        walks = [walk for walk in walks if walk.state.seq_id in watched and walk.token_ids and walk.state.failure is None]
        if not walks:
            return []
        best = best_tokens(logits).astype(np.int32)
        top = self._find_top(logits) if self._num_top else None
        seen = []
        for walk in walks:
            chosen = best[walk.root : walk.root + 1 + len(walk.draft.token_ids)].copy()
            chosen[[0, *[place + 1 for place in walk.path]]] = walk.token_ids
            seen.append(_see(walk, chosen, hidden, top))
        return seen

    def _find_top(self, logits: FloatArray) -> IntArray:
        return largest_ids(logits, self._num_top) if self._watched is None else self._watched.find_top(logits, self._num_top)

    def _forward(self, run: list[Part]) -> FloatArray:
        batch = forward_batch(run, self._block_size)
        logits = np.ascontiguousarray(self._program.forward(batch), np.float32)
        if len(logits) != len(batch.logit_rows):
            raise EngineError(f"the program returned logits of shape {logits.shape}")
        return logits

    def _advance(self, going: list[Walk], logits: FloatArray, finite: BoolArray) -> list[Walk]:
        """Takes one more token on each walk; returns those that go on, each through a draft that foresaw its token."""
        for walk in going:
            if not finite[walk.row]:
                walk.state.failure = NOT_FINITE
        going = [walk for walk in going if walk.state.failure is None]
        if not going:
            return []
        states, rows = [walk.state for walk in going], [walk.row for walk in going]
        draws = self._batch.draws(states, rows)
        coupled = [place for place, walk in enumerate(going) if walk.draft.probs is None or walk.state.is_coupled]
        tokens = np.empty(len(going), np.int64)
        children: list[int | None] = [None] * len(going)
        if coupled:
            tokens[coupled] = self._sampler.choose(logits, [states[place] for place in coupled], draws[coupled])
            for place in coupled:
                children[place] = going[place].child_of(int(tokens[place]))
        if len(coupled) < len(going):
            drawn = [place for place in range(len(going)) if place not in set(coupled)]
            found = _accept([going[place] for place in drawn], logits[[rows[place] for place in drawn]], draws[drawn])
            for place, (child, token) in zip(drawn, found, strict=True):
                children[place], tokens[place] = child, token
        entries = sample_logprobs(states, rows, logits, tokens)
        on = []
        for place, walk in enumerate(going):
            if self._take(walk, int(tokens[place]), children[place], entries.get(place)):
                on.append(walk)
        return on

    def _take(self, walk: Walk, token_id: int, child: int | None, entry: list[TokenLogprobs] | None) -> bool:
        """Gives a sequence its token; whether its walk goes on."""
        state = walk.state
        if token_id < 0:
            state.failure = (state.grammar and state.grammar.failure) or NOTHING_LEFT
            return False
        state.append(token_id)
        if state.failure is not None:
            return False
        if entry is not None:
            walk.logprobs = [*(walk.logprobs or []), *entry]
        if not walk.take(token_id, child):
            return False
        if state.grammar is not None:
            if state.grammar.is_complete:
                walk.path.pop()  # nothing can follow, so there is no token to choose behind the draft
                return False
            state.grammar.look_ahead()
        return True

    # Both

    def _start(self, parts: list[Part], forks: Sequence[Fork], rows: dict[int, slice]) -> list[Walk]:
        """Returns a walk for each sequence that samples, forked children after their parents' like."""
        walks = {}
        for part in parts:
            if part.plan.num_samples:
                root = rows[part.plan.seq_id].start + part.num_prompt_rows
                walks[part.plan.seq_id] = Walk(part.state, part.draft, root)
        children = []
        for fork in forks:
            child = self._batch.fork(fork.parent_id, fork.child_id, fork.index)
            if child.failure is None and fork.parent_id not in walks:
                raise EngineError(f"sequence {fork.parent_id} forks in a step in which it does not sample")
            self._drafting.fork(fork.parent_id, fork.child_id)
            if fork.parent_id in walks:
                children.append(Walk(child, NOTHING, walks[fork.parent_id].root))
        return [walk for walk in (*walks.values(), *children) if walk.state.failure is None]

    def _hidden(self, parts: list[Part]) -> FloatArray | None:
        if not self._wants_hidden or self._head is None or not any(part.plan.is_watched for part in parts):
            return None
        return self._head.read_hidden()

    def _keep_paths(self, live: list[Part], walks: list[Walk]) -> None:
        """Moves the KV of accepted drafts to where a chain would have it."""
        parts = {part.plan.seq_id: part for part in live if part.draft.parents is not None}
        moves = []
        for walk in walks:
            part = parts.get(walk.state.seq_id)
            if part is not None:
                slots = walk.state.blocks
                size = self._block_size
                moves += [[slots[p // size] * size + p % size for p in move] for move in walk.moves(part)]
        if moves:
            if self._tree is None:
                raise EngineError("the program computes no token trees, but a tree was drafted")
            self._tree.move_positions(np.array(moves, np.int32))


def _watched(parts: list[Part], forks: Sequence[Fork]) -> set[int]:
    watched = {part.plan.seq_id for part in parts if part.plan.is_watched or part.plan.num_drafts}
    return watched | {fork.child_id for fork in forks if fork.parent_id in watched}


def _see(walk: Walk, chosen: IntArray, hidden: FloatArray | None, top: IntArray | None) -> VerifyFeedback:
    own = slice(walk.root, walk.root + 1 + len(walk.draft.token_ids))
    start = len(walk.state.tokens) - len(walk.token_ids) - 1
    return VerifyFeedback(
        state=walk.state,
        start=start,
        draft=walk.draft,
        path=tuple(walk.path),
        chosen=chosen,
        hidden=None if hidden is None else hidden[own],
        top=None if top is None else top[own],
    )


def _accept(walks: list[Walk], logits: FloatArray, draws: DrawArray) -> list[tuple[int | None, int]]:
    """Decides on the next token of walks whose drafts were drawn by chance, [num_walks] rows of logits and draws."""
    probs = distribution(adjusted(logits, [walk.state for walk in walks]), draws)
    rivals = [walk.rivals() for walk in walks]
    keys = noise_keys(draws["seed"], draws["index"], draws["position"])
    numbers = uniforms(keys[:, None], Domain.VERIFY, np.arange(1 + max(map(len, rivals)))).tolist()
    return [accept_child(*each) for each in zip(probs, rivals, numbers, strict=True)]


def largest_ids(logits: FloatArray, count: int) -> IntArray:
    """Returns the ids of each row's largest logits, best first, lower ids first among equal ones, [num_rows, count]."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return order.astype(np.int32)
