"""`HistoryProgram` with token trees, and a drafter that knows the answers but is often wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.backends.base import Capability
from cloister.executor.drafters import NOTHING, Draft, Drafter, DraftRequest
from cloister.scheduler.speculation import DraftDecision
from tests.history_program import FloatArray, HistoryProgram, history_logits
from tests.samplers import DrawingHistoryProgram

__all__ = ["DrawingTreeProgram", "Erratic", "Prophet", "TreeHistoryProgram"]


class TreeHistoryProgram(HistoryProgram):
    """Keeps a tree's tokens in the slots that `ForwardBatch.parents` says, and reads a node's history along its path.

    Args:
        moves: False forgets to move accepted positions, as a broken program would.
    """

    capabilities = Capability.TREES

    def __init__(self, *, moves: bool = True, **options) -> None:
        super().__init__(**options)
        self.num_trees = 0
        self._moves = moves

    def compute(self, batch) -> FloatArray:
        if batch.parents is None:
            return super().compute(batch)
        self.num_trees += 1
        logits = np.empty((batch.logit_rows.size, self.vocab_size), np.float32)
        for i, (start, end) in enumerate(zip(batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist(), strict=True)):
            first = int(batch.context_lens[i]) - (end - start)
            table = batch.block_tables[i]
            for token in range(start, end):
                self.slots[table[(first + token - start) // self.block_size], (first + token - start) % self.block_size] = (
                    batch.token_ids[token] + 1,
                    batch.positions[token],
                )
            before = self._read(table, first).tolist()
            paths: list[list[int]] = []
            for token in range(start, end):
                parent = int(batch.parents[token])
                assert start <= parent < token or parent == -1
                above = paths[parent - start] if parent >= 0 else []
                assert batch.positions[token] == first + len(above)
                paths.append([*above, int(batch.token_ids[token])])
            for row in np.flatnonzero((batch.logit_rows >= start) & (batch.logit_rows < end)):
                seen = before + paths[int(batch.logit_rows[row]) - start]
                logits[row] = np.nan if self.poison in seen else history_logits(seen, self.vocab_size)
        return logits

    def move_positions(self, moves) -> None:
        flat = self.slots.reshape(-1, 2)
        for source, target in moves.tolist() if self._moves else ():
            flat[target] = flat[source]


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

    def learn_step(self, size, num_drafted, elapsed_s, asked, draft_s) -> None:
        self.cost |= asked
        assert num_drafted <= size.num_tokens
