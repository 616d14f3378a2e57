"""Drafts of a virtual engine: a drafter that knows the program and is wrong on purpose, and random draft lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from cloister.backends.base import SamplingMetadata
from cloister.cluster.virtual.history_program import FloatArray
from cloister.executor.drafters import NOTHING, Draft, Drafter, DraftRequest
from cloister.executor.logits_processors import Penalties, process_logits
from cloister.executor.sampling import Sampler
from cloister.executor.state import SequenceState
from cloister.scheduler.sequence import SequenceRecord
from cloister.scheduler.speculation import NO_DRAFTS, DraftDecision
from cloister.scheduler.step_cost import StepCost, StepSize
from cloister.types.step import Sample

DraftKind = Literal["none", "chain", "tree"]
DRAFTER: Final = "foresight"
MAX_DRAFTS: Final = 6
RIGHT: Final = 0.75
"""Probability that the right token is among the children of a node on the right path."""
SILENT: Final = 0.1
"""Probability of an empty draft."""


class ForesightDrafter(Drafter):
    """Drafts the tokens that the program will choose, and wrong ones, as a chain or a tree.

    Args:
        look: returns the logits that follow the tokens of a sequence.
        sampling_metadata: how its next token is sampled (`executor.drafters.DrafterContext`).
        draw: decides what is wrong.
        has_trees: drafts have branches.
    """

    max_drafts = MAX_DRAFTS

    def __init__(
        self,
        look: Callable[[SequenceState], FloatArray],
        sampling_metadata: Callable[[list[SequenceState], list[int]], SamplingMetadata],
        vocab_size: int,
        draw: random.Random,
        *,
        has_trees: bool,
    ) -> None:
        self._look, self._sampling_metadata, self._vocab_size = look, sampling_metadata, vocab_size
        self._draw, self._has_trees = draw, has_trees
        self._sampler = Sampler(vocab_size)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        if self._draw.random() < SILENT:
            return NOTHING
        ahead: SequenceState | None = _copy(request.state)
        token_ids: list[int] = []
        parents: list[int] = []
        place = -1
        while len(token_ids) < request.num_drafts:
            rivals = self._draw.sample(range(self._vocab_size), self._draw.choice((1, 2, 3)) if self._has_trees else 1)
            right = None if ahead is None else self._find_next(ahead)
            if right is not None and self._draw.random() < RIGHT:
                rivals[self._draw.randrange(len(rivals))] = right
            rivals = list(dict.fromkeys(rivals))[: request.num_drafts - len(token_ids)]
            first = len(token_ids)
            token_ids += rivals
            parents += [place] * len(rivals)
            if right in rivals:
                place = first + rivals.index(right)
            else:
                place, ahead = first, None
        return Draft(token_ids, parents if self._has_trees else None)

    def _find_next(self, state: SequenceState) -> int | None:
        """Returns the token that the program will choose, and appends it; None if there is none."""
        if state.grammar is not None and state.grammar.is_complete:
            return None
        scores = process_logits(self._look(state)[None], [state])
        token = int(self._sampler.sample(scores, self._sampling_metadata([state], [0]))[0])
        if token < 0:
            return None
        state.append(token)
        if state.grammar is not None:
            state.grammar.look_ahead()
        return token


def _copy(state: SequenceState) -> SequenceState:
    """Returns a copy that may go on by itself."""
    penalties = state.penalties
    if penalties is not None:
        penalties = Penalties(penalties.repetition, penalties.presence, penalties.frequency, penalties.counts.copy())
    grammar = None if state.grammar is None else state.grammar.copy()
    return replace(state, tokens=state.tokens[:], penalties=penalties, grammar=grammar)


class RandomSpeculation:
    """Requests a random number of drafts each time (protocol `scheduler.speculation.Speculation`); learns nothing."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def choose(self, sequences: Sequence[SequenceRecord], cost: StepCost, size: StepSize, num_left: int) -> list[DraftDecision]:
        """Returns a decision for each sequence."""
        choices = []
        for _ in sequences:
            num = min(self._draw.randint(0, MAX_DRAFTS), max(0, num_left))
            num_left -= num
            choices.append(DraftDecision(DRAFTER, num, None, True) if num else NO_DRAFTS)
        return choices

    def learn(self, sequence: SequenceRecord, choice: DraftDecision, sample: Sample) -> None:
        """Nothing to learn."""

    def learn_cost(self, num_drafted: Mapping[str, tuple[int, int]], draft_s: Mapping[str, float]) -> None:
        """Nothing to learn."""

    def learn_step(self, size: StepSize, num_drafted: int, elapsed_s: float) -> None:
        """Nothing to learn."""
