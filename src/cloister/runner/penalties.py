"""Repetition, presence and frequency penalties, from token counts that grow with the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.runner.growing import GrowingInts

FloatArray = npt.NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of one sequence, and how often each is in its output. Kept only where a penalty asks for it."""

    def __init__(self, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        distinct, places = np.unique(token_ids, return_inverse=True)
        self._ids = GrowingInts(distinct)
        self._num_output = GrowingInts(np.bincount(places[num_prompt_tokens:], minlength=distinct.size))
        self._places = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Distinct tokens of prompt and output, [num_distinct]."""
        return self._ids.view

    @property
    def num_output(self) -> npt.NDArray[np.int32]:
        """Occurrences of each of `ids` in the output, [num_distinct]; 0 for tokens of the prompt only."""
        return self._num_output.view

    def add(self, token_id: int) -> None:
        """Counts one sampled token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._num_output.append(0)
        self._num_output.view[place] += 1

    def copy(self) -> TokenCounts:
        """Returns counts that grow on their own (a fork)."""
        twin = object.__new__(TokenCounts)
        twin._ids, twin._num_output, twin._places = self._ids.copy(), self._num_output.copy(), dict(self._places)
        return twin


@dataclass(frozen=True, slots=True)
class Penalties:
    """What one sequence asks for, with its counts. `SamplingParams` says what each one means."""

    repetition: float
    presence: float
    frequency: float
    counts: TokenCounts


def apply_penalties(scores: FloatArray, rows: Sequence[int], penalties: Sequence[Penalties]) -> None:
    """Changes `scores` [num_rows, vocab] in place: row `rows[i]` by `penalties[i]`."""
    sizes = [len(p.counts.ids) for p in penalties]
    row = np.repeat(np.asarray(rows), sizes)
    ids = np.concatenate([p.counts.ids for p in penalties])
    num_output = np.concatenate([p.counts.num_output for p in penalties])
    repetition = np.repeat(np.array([p.repetition for p in penalties], np.float32), sizes)
    presence = np.repeat(np.array([p.presence for p in penalties], np.float32), sizes)
    frequency = np.repeat(np.array([p.frequency for p in penalties], np.float32), sizes)
    values = scores[row, ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * num_output + presence * (num_output > 0)
    scores[row, ids] = values
