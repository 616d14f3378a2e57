"""Per-request changes of logits before sampling: penalties, bias, masked stop tokens, grammars."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cloister.executor.arrays import as_ints
from cloister.executor.grammar import MaskArray, mask_tokens

if TYPE_CHECKING:
    from cloister.executor.state import SequenceState

FloatArray = npt.NDArray[np.float32]


def process_logits(logits: FloatArray, states: Sequence[SequenceState]) -> FloatArray:
    """Returns logits after penalties, bias, masked stop tokens and grammars: a copy, or the array itself if no row needs
    changes."""
    penalties: dict[int, Penalties] = {}
    biases: dict[int, LogitBias] = {}
    masks: dict[int, MaskArray] = {}
    stop_masks: dict[int, LogitBias] = {}
    for row, state in enumerate(states):
        if state.penalties is not None:
            penalties[row] = state.penalties
        if state.bias is not None:
            biases[row] = state.bias
        if state.grammar is not None:  # first: its result decides whether stop tokens are still masked
            masks[row] = state.grammar.mask()
        if (stop_mask := state.active_stop_mask) is not None:
            stop_masks[row] = stop_mask
    if not (penalties or biases or stop_masks or masks):
        return logits
    scores = logits.copy()
    if penalties:
        apply_penalties(scores, list(penalties), list(penalties.values()))
    for additions in (biases, stop_masks):
        if additions:
            apply_bias(scores, list(additions), list(additions.values()))
    mask_tokens(scores, list(masks), list(masks.values()))
    return scores


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to logits of tokens: `logit_bias`, and stop tokens that are masked before `min_tokens`.

    Attributes:
        ids: [num_biased] distinct token ids.
        values: [num_biased] float32; -inf masks a token.
    """

    ids: npt.NDArray[np.int64]
    values: FloatArray

    @classmethod
    def mask(cls, ids: Sequence[int]) -> LogitBias:
        """Masks each of `ids`."""
        return cls(np.array(ids, np.int64), np.full(len(ids), -np.inf, np.float32))


def apply_bias(scores: FloatArray, rows: Sequence[int], biases: Sequence[LogitBias]) -> None:
    """Adds to `scores` [num_rows, vocab] in place: `biases[i]` to row `rows[i]`; no row is named twice."""
    row = np.repeat(np.asarray(rows), [bias.ids.size for bias in biases])
    ids = np.concatenate([bias.ids for bias in biases])
    scores[row, ids] += np.concatenate([bias.values for bias in biases])


class TokenCounts:
    """The distinct tokens of one sequence, with their counts in its output. Kept only if a penalty needs them."""

    def __init__(self, token_ids: npt.NDArray[np.int32], num_prompt_tokens: int) -> None:
        distinct, places = np.unique(token_ids, return_inverse=True)
        # growable C arrays; views of them are released before the next token
        self._ids = array("i", distinct.tolist())
        self._num_output = array("i", np.bincount(places[num_prompt_tokens:], minlength=distinct.size).tolist())
        self._places = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Distinct tokens of prompt and output, [num_distinct]."""
        return as_ints(self._ids)

    @property
    def num_output(self) -> npt.NDArray[np.int32]:
        """Occurrences of each of `ids` in the output, [num_distinct]; 0 for tokens of the prompt only."""
        return as_ints(self._num_output)

    def add(self, token_id: int) -> None:
        """Counts one sampled token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._num_output.append(0)
        self._num_output[place] += 1

    def copy(self) -> TokenCounts:
        """Returns an independent copy (for a fork)."""
        twin = object.__new__(TokenCounts)
        twin._ids, twin._num_output, twin._places = self._ids[:], self._num_output[:], dict(self._places)
        return twin


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of one sequence, with its counts; see `SamplingParams`."""

    repetition: float
    presence: float
    frequency: float
    counts: TokenCounts


def apply_penalties(scores: FloatArray, rows: Sequence[int], penalties: Sequence[Penalties]) -> None:
    """Applies penalties to `scores` [num_rows, vocab] in place: `penalties[i]` to row `rows[i]`."""
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
