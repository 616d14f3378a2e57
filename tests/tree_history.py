"""`HistoryProgram` with token trees alone, and a drafter that knows the answers but is often wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import Capability
from cloister.executor.drafters import NOTHING, Draft, Drafter, DraftRequest
from cloister.scheduler.speculation import DraftDecision
from tests.history_program import FloatArray, HistoryProgram
from tests.samplers import DrawingHistoryProgram

__all__ = ["DrawingTreeProgram", "Erratic", "Prophet", "TreeHistoryProgram"]


class TreeHistoryProgram(HistoryProgram):
    """Counts the steps with trees.

    Args:
        moves: False forgets to move accepted positions, as a broken program would.
    """

    capabilities = Capability.TREES

    def __init__(self, *, moves: bool = True, **options) -> None:
        super().__init__(**options)
        self.num_trees = 0
        self._moves = moves

    def compute(self, batch) -> FloatArray:
        self.num_trees += batch.parents is not None
        return super().compute(batch)

    def move_positions(self, moves) -> None:
        if self._moves:
            super().move_positions(moves)


class DrawingTreeProgram(DrawingHistoryProgram, TreeHistoryProgram):
    """The same, and samples tokens itself."""

    capabilities = Capability.TREES | Capability.SAMPLING


class Prophet(Drafter):
    """Drafts what is known to come, beside wrong tokens, in trees of changing shape.

    Args:
        answers: prompts with their answers.
        rightness: how often the right token is among the children of a node on the right path.
    """

    def __init__(
        self, answers: Sequence[Sequence[int]], vocab_size: int, rightness: float = 0.8, *, chains: bool = False
    ) -> None:
        self._answers = [list(answer) for answer in answers]
        self._vocab_size = vocab_size
        self._rightness = rightness
        self._chains = chains
        self._rng = np.random.default_rng(5)
        self.forgotten: list[int] = []
        self.seen: list = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._tree(request) for request in requests]

    def observe(self, seen) -> None:
        self.seen += seen

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)

    def _tree(self, request: DraftRequest) -> Draft:
        known = request.state.tokens.tolist()
        coming = next((answer[len(known) :] for answer in self._answers if answer[: len(known)] == known), [])
        if not coming or self._rng.random() < 0.1:
            return NOTHING
        tokens: list[int] = []
        parents: list[int] = []
        place, depth = -1, 0
        while len(tokens) < request.num_drafts:
            rivals = 1 if self._chains else int(self._rng.integers(1, 4))
            drawn = self._rng.choice(self._vocab_size, rivals, replace=False).tolist()
            is_right = depth < len(coming) and self._rng.random() < self._rightness
            if is_right and coming[depth] not in drawn:
                drawn[int(self._rng.integers(rivals))] = coming[depth]
            first = len(tokens)
            tokens += drawn
            parents += [place] * rivals
            right = [first + i for i, token in enumerate(drawn) if depth < len(coming) and token == coming[depth]]
            place = right[0] if right else first
            depth += 1
        tokens, parents = tokens[: request.num_drafts], parents[: request.num_drafts]
        return Draft(tokens, None if self._chains else parents)


class Erratic:
    """Wants some number of drafts, another one each time (protocol `scheduler.speculation.Speculation`)."""

    def __init__(self, drafter: str = "prophet", most: int = 9) -> None:
        self._rng = np.random.default_rng(3)
        self._drafter = drafter
        self._most = most
        self.num_drafted = self.num_accepted = self.num_learned = 0
        self.cost: dict[str, tuple[int, int]] = {}

    def choose(self, sequences, cost, size, num_left):
        counts = self._rng.integers(0, self._most + 1, len(sequences)).tolist()
        return [
            DraftDecision(self._drafter, count, None, True) if count else DraftDecision(is_watched=True) for count in counts
        ]

    def learn(self, sequence, choice, sample) -> None:
        self.num_learned += 1
        self.num_drafted += sample.num_drafted
        self.num_accepted += len(sample.accepted)

    def learn_cost(self, num_drafted, draft_s) -> None:
        self.cost |= num_drafted

    def learn_step(self, size, num_drafted, elapsed_s) -> None:
        assert num_drafted <= size.num_tokens
