"""Chooses tokens from logits, in numpy: the specification, which a program that can draw follows (`backends.base`).

A row's token depends on that row alone: its logits, its parameters, its noise (rule 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cloister.backends.base import DrawArray
from cloister.runner.adjusting import adjusted
from cloister.runner.filters import kept_tokens
from cloister.runner.noise import KeyArray, Noise, noise_keys
from cloister.runner.pieces import row_pieces
from cloister.runner.state import SequenceState

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_GROUP_TOKENS = 256


def finite_rows(logits: FloatArray) -> npt.NDArray[np.bool_]:
    """Says which rows hold finite numbers only, [num_rows]: min and max let neither NaN nor infinity pass unseen."""
    finite: npt.NDArray[np.bool_] = np.isfinite(logits.max(axis=1)) & np.isfinite(logits.min(axis=1))
    return finite


def best_tokens(logits: FloatArray) -> IntArray:
    """Returns the id of each row's largest logit, the lowest among equal ones; -1 for a row that is not finite.

    One row after the other while it is in the cache: at 150,000 tokens a pass over all rows comes from memory.
    """
    tokens = np.empty(len(logits), np.int64)
    for piece in row_pieces(*logits.shape):
        rows = logits[piece]
        best = rows.argmax(axis=1)
        # a NaN is the largest of its row, and so is plus infinity; minus infinity is the smallest
        finite = np.isfinite(rows[np.arange(len(rows)), best]) & np.isfinite(rows.min(axis=1))
        tokens[piece] = np.where(finite, best, -1)
    return tokens


class Sampler:
    """Temperature, truncation and noise over a vocabulary; greedy where the temperature is 0."""

    def __init__(self, vocab_size: int) -> None:
        self._starts = np.arange(0, vocab_size, _GROUP_TOKENS)
        self._groups = vocab_size + np.arange(self._starts.size)
        self._noise = Noise(vocab_size + self._starts.size)

    def choose(self, logits: FloatArray, states: Sequence[SequenceState], draws: DrawArray) -> IntArray:
        """Chooses one token per draw.

        Args:
            logits: [num_rows, vocab] float32, finite; left as they are.
            states: the sequence of each draw, for penalties, bias and bars.
            draws: [num_draws] of `DRAW`.

        Returns:
            [num_draws] token ids; -1 where bias and bars leave nothing to choose.
        """
        tokens = np.empty(len(states), np.int64)
        rows, keys = draws["row"], noise_keys(draws["seed"], draws["index"], draws["position"])
        picked = logits if rows.tolist() == list(range(len(logits))) else logits[rows]
        for piece in row_pieces(*picked.shape):
            tokens[piece] = self._choose_piece(adjusted(picked[piece], states[piece]), draws[piece], keys[piece])
        return tokens

    def _choose_piece(self, scores: FloatArray, columns: DrawArray, keys: KeyArray) -> IntArray:
        tokens: IntArray = scores.argmax(axis=1)
        best = scores[np.arange(len(tokens)), tokens]
        choosable = np.isfinite(best)
        tokens[~choosable] = -1
        drawn = np.flatnonzero(choosable & (columns["temperature"] > 0))
        if drawn.size:
            with np.errstate(over="ignore"):  # a cold temperature sends unlikely tokens to -inf, which is right
                scaled = (scores if drawn.size == len(scores) else scores[drawn]) - best[drawn, None]
                scaled /= columns["temperature"][drawn, None]
            tokens[drawn] = self._draw(scaled, columns[drawn], keys[drawn])
        return tokens

    def _draw(self, scaled: FloatArray, columns: DrawArray, keys: KeyArray) -> IntArray:
        """Draws one token per row from softmax(scaled) after truncation; the largest of each row is 0."""
        filtered = (columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)
        if not filtered.any():
            return self._draw_any(scaled, keys)
        tokens = np.empty(len(keys), np.int64)
        tokens[filtered] = self._draw_kept(scaled[filtered], columns[filtered], keys[filtered])
        if not filtered.all():
            tokens[~filtered] = self._draw_any(scaled[~filtered], keys[~filtered])
        return tokens

    def _draw_any(self, scaled: FloatArray, keys: KeyArray) -> IntArray:
        """Draws a group of neighbouring tokens by its whole weight, then a token inside it by its own.

        The product of both is the token's probability. Noise for every token would cost five times all the rest.
        """
        weights = np.exp(scaled, out=scaled)
        races = np.add.reduceat(weights, self._starts, axis=1) / self._noise.at(keys[:, None], self._groups)
        first = self._starts[races.argmax(axis=1), None]
        # past the end of the vocabulary its last token stands again, and of equal racers the first one wins
        ids = np.minimum(first + np.arange(_GROUP_TOKENS), scaled.shape[1] - 1)
        races = np.take_along_axis(weights, ids, axis=1) / self._noise.at(keys[:, None], ids)
        tokens: IntArray = np.take_along_axis(ids, races.argmax(axis=1)[:, None], axis=1)[:, 0]
        return tokens

    def _draw_kept(self, scaled: FloatArray, columns: DrawArray, keys: KeyArray) -> IntArray:
        """Draws among the kept tokens, whose noise alone is computed."""
        kept = kept_tokens(scaled, columns["top_k"], columns["top_p"], columns["min_p"])
        rows, ids = np.divmod(np.flatnonzero(kept), kept.shape[1])  # ten times as quick as nonzero of two dimensions
        races = np.exp(scaled[rows, ids]) / self._noise.at(keys[rows], ids)
        starts = np.searchsorted(rows, np.arange(len(keys)))
        winners = np.flatnonzero(races == np.maximum.reduceat(races, starts)[rows])
        _, first = np.unique(rows[winners], return_index=True)
        tokens: IntArray = ids[winners[first]]
        return tokens
