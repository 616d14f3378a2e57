"""Beam search over the sequences of one request. Pure: it is given the likeliest next tokens, and says which beginnings go on.

The search of `transformers` (`generate(num_beams=...)`, `do_sample=False`), which the tests hold it against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from cloister.scheduler.admission import MAX_CANDIDATES
from cloister.types.request import BeamSearch


class Beam(NamedTuple):
    """A beginning that goes on: the sequence that it continues, the token that follows there, and its log-probability."""

    parent_id: int
    token_id: int
    logprob: float


class Hypothesis(NamedTuple):
    """A complete answer, the token that ended it included, and its score."""

    score: float
    token_ids: list[int]
    is_ended: bool
    """By a token; else it is as long as it may get."""


class Beams:
    """The beams of one request.

    Args:
        ends: tokens that end an answer.
        max_output: tokens of an answer at most.

    Attributes:
        hypotheses: complete answers, the best first, `width` at most.
        is_done: nothing better can come.
    """

    def __init__(self, search: BeamSearch, ends: Iterable[int], max_output: int) -> None:
        self.search = search
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False
        self._ends = frozenset(ends)
        self._max_output = max_output
        self._logprobs: dict[int, float] = {}
        self._candidates: dict[int, Sequence[tuple[int, float]]] = {}

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that are asked of each beam: enough for `width` beams to go on if all others end."""
        return max(2, 1 + len(self._ends)) * self.search.width

    def find_excess(self) -> str | None:
        """Says why a step of the search would take too long, or returns None."""
        if self.search.width * self.num_candidates <= MAX_CANDIDATES:
            return None
        return f"{self.search.width} beams with {len(self._ends)} tokens that end an answer are too many; take fewer of either"

    def start(self, logprobs: Mapping[int, float]) -> None:
        """Says which sequences are the beams from now on, and their log-probabilities so far."""
        self._logprobs = dict(logprobs)

    def take(self, seq_id: int, candidates: Sequence[tuple[int, float]]) -> bool:
        """Takes the likeliest next tokens of one beam, with log-probabilities; True once all beams have theirs."""
        self._candidates[seq_id] = candidates
        return self._candidates.keys() == self._logprobs.keys()

    def advance(self, outputs: Mapping[int, Sequence[int]]) -> list[Beam]:
        """Returns the beams that go on, the best first; those that end become hypotheses.

        Args:
            outputs: output of each beam so far.
        """
        length = 1 + len(next(iter(outputs.values())))
        divisor = length**self.search.length_penalty
        places = {seq_id: place for place, seq_id in enumerate(self._logprobs)}
        found = (
            Beam(seq_id, token_id, self._logprobs[seq_id] + logprob)
            for seq_id, candidates in self._candidates.items()
            for token_id, logprob in candidates
        )
        best = nsmallest(self.num_candidates, found, key=lambda beam: (-beam.logprob, places[beam.parent_id], beam.token_id))
        self._candidates = {}
        kept: list[Beam] = []
        width, is_last = self.search.width, length >= self._max_output
        for rank, beam in enumerate(best):
            is_end = beam.token_id in self._ends
            if not (is_end or is_last):
                kept.append(beam)
            elif rank < width:  # an end that is less likely than `width` others is none
                token_ids = [*outputs[beam.parent_id], beam.token_id]
                self.hypotheses.append(Hypothesis(beam.logprob / divisor, token_ids, is_end))
        self.hypotheses = sorted(self.hypotheses, key=lambda hypothesis: -hypothesis.score)[:width]
        kept = kept[:width]
        is_full = len(self.hypotheses) == width
        can_improve = bool(kept) and (not is_full or kept[0].logprob / divisor > self.hypotheses[-1].score)
        self.is_done = not can_improve or (is_full and self.search.early_stopping)
        return kept
