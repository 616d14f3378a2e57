"""Samples tokens from logits, in numpy: the reference for programs that sample (`backends.base`).

Truncation is top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024). A row's token depends on that row
alone: its logits, its parameters, its noise (batch invariance).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.backends.base import SamplingMetadata
from cloister.executor.noise import KeyArray, Noise, noise_keys

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

NOT_FINITE: Final = "the model computed a value that is not a finite number; send the request again or choose another dtype"
NOTHING_LEFT: Final = "logit_bias, min_tokens and the grammar leave no token to choose; relax one of them"
_GROUP_TOKENS: Final = 256
_FIRST_WIDTH: Final = 512
_PIECE_ELEMENTS: Final = 2**18


def row_pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Yields slices that cover `num_rows` rows in order, each of about 2^18 elements and at least one row.

    Intermediate results of a slice fit into the CPU cache.
    """
    step = max(1, _PIECE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def finite_rows(logits: FloatArray) -> BoolArray:
    """Returns which rows contain only finite numbers, [num_rows]: min and max propagate NaN and infinity."""
    finite: BoolArray = np.isfinite(logits.max(axis=1)) & np.isfinite(logits.min(axis=1))
    return finite


def greedy_tokens(logits: FloatArray) -> npt.NDArray[np.int32]:
    """Returns the id of each row's largest logit, the lowest among equal ones; -1 for a row that is not finite.

    Works row by row while a row is in the cache: at 150,000 tokens a pass over all rows would read from memory.
    """
    tokens = np.empty(len(logits), np.int32)
    for piece in row_pieces(*logits.shape):
        rows = logits[piece]
        best = rows.argmax(axis=1)
        # argmax treats NaN and plus infinity as the largest; minus infinity is the smallest
        finite = np.isfinite(rows[np.arange(len(rows)), best]) & np.isfinite(rows.min(axis=1))
        tokens[piece] = np.where(finite, best, -1)
    return tokens


class Sampler:
    """Temperature, truncation and noise over a vocabulary; greedy where the temperature is 0."""

    def __init__(self, vocab_size: int) -> None:
        self._starts = np.arange(0, vocab_size, _GROUP_TOKENS)
        self._groups = vocab_size + np.arange(self._starts.size)
        self._noise = Noise(vocab_size + self._starts.size)

    def sample(self, logits: FloatArray, sampling: SamplingMetadata) -> IntArray:
        """Samples one token per entry (`backends.base.Program.sample`).

        Args:
            logits: [num_rows, vocab] float32, in which minus infinity masks a token; not modified.
            sampling: [num_samples] of `SAMPLING_METADATA`.

        Returns:
            [num_samples] token ids; -1 where all tokens are masked, or a logit is not a number or plus infinity.
        """
        tokens = np.empty(len(sampling), np.int64)
        rows, keys = sampling["row"], noise_keys(sampling["seed"], sampling["index"], sampling["position"])
        picked = logits if rows.tolist() == list(range(len(logits))) else logits[rows]
        for piece in row_pieces(*picked.shape):
            tokens[piece] = self._sample_piece(picked[piece], sampling[piece], keys[piece])
        return tokens

    def _sample_piece(self, scores: FloatArray, columns: SamplingMetadata, keys: KeyArray) -> IntArray:
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

    def _draw(self, scaled: FloatArray, columns: SamplingMetadata, keys: KeyArray) -> IntArray:
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
        """Draws a group of neighbouring tokens by its total weight, then a token inside it.

        The product of both is the token's probability. Noise for every token would cost five times everything else.
        """
        weights = np.exp(scaled, out=scaled)
        races = np.add.reduceat(weights, self._starts, axis=1) / self._noise.at(keys[:, None], self._groups)
        first = self._starts[races.argmax(axis=1), None]
        # beyond the vocabulary its last token is repeated; of equal ones the first wins
        ids = np.minimum(first + np.arange(_GROUP_TOKENS), scaled.shape[1] - 1)
        races = np.take_along_axis(weights, ids, axis=1) / self._noise.at(keys[:, None], ids)
        tokens: IntArray = np.take_along_axis(ids, races.argmax(axis=1)[:, None], axis=1)[:, 0]
        return tokens

    def _draw_kept(self, scaled: FloatArray, columns: SamplingMetadata, keys: KeyArray) -> IntArray:
        """Draws among the kept tokens; computes noise for these only."""
        kept = kept_tokens(scaled, columns["top_k"], columns["top_p"], columns["min_p"])
        rows, ids = np.divmod(np.flatnonzero(kept), kept.shape[1])  # ten times as fast as nonzero in two dimensions
        races = np.exp(scaled[rows, ids]) / self._noise.at(keys[rows], ids)
        starts = np.searchsorted(rows, np.arange(len(keys)))
        winners = np.flatnonzero(races == np.maximum.reduceat(races, starts)[rows])
        _, first = np.unique(rows[winners], return_index=True)
        tokens: IntArray = ids[winners[first]]
        return tokens


def kept_tokens(
    scaled: FloatArray, top_k: IntArray, top_p: npt.NDArray[np.float64], min_p: npt.NDArray[np.float64]
) -> BoolArray:
    """Returns which tokens may be drawn.

    Args:
        scaled: [num_rows, vocab] logits after temperature, minus the row's largest (which becomes 0).
        top_k: [num_rows], 0 is off. Of equal tokens the lower ids are kept, so exactly k remain.
        top_p: [num_rows], 1 is off. Keeps the smallest set of most likely tokens with a mass of at least top_p.
        min_p: [num_rows], 0 is off. Keeps tokens at least min_p times as likely as the most likely one.

    Returns:
        [num_rows, vocab] bool; every row keeps at least one.
    """
    with np.errstate(divide="ignore"):
        floor = np.log(min_p).astype(np.float32)
    kept: BoolArray = scaled >= np.minimum(floor, np.float32(0))[:, None]
    limits = np.where((top_k > 0) & (top_k < scaled.shape[1]), top_k, scaled.shape[1])
    limited = np.flatnonzero((limits < scaled.shape[1]) | (top_p < 1))
    if limited.size:
        kept[limited] &= _most_likely(scaled[limited], limits[limited], top_p[limited], _FIRST_WIDTH)
    return kept


def _most_likely(scaled: FloatArray, limits: IntArray, top_p: npt.NDArray[np.float64], width: int) -> BoolArray:
    """Keeps at most `limits` tokens per row, and no more than needed for the mass `top_p`.

    Considers the `width` largest values first, and more if a row's limit or mass requires it.
    """
    vocab_size = scaled.shape[1]
    bounded = limits < vocab_size
    width = min(vocab_size, max(width, int(limits[bounded].max(initial=1))))
    largest = _largest(scaled, width)
    mass = np.cumsum(np.exp(largest), axis=1, dtype=np.float64)
    total = np.where(bounded, mass[np.arange(len(limits)), np.minimum(limits, width) - 1], np.inf)
    if not bounded.all():
        total[~bounded] = np.exp(scaled[~bounded]).sum(axis=1)
    wanted = np.where(top_p < 1, top_p * total, np.inf)
    counts = np.minimum((mass < wanted[:, None]).sum(axis=1) + 1, limits)
    narrow = counts > width
    kept = _first_in_order(scaled, largest, np.minimum(counts, width))
    if narrow.any():
        kept[narrow] = _most_likely(scaled[narrow], limits[narrow], top_p[narrow], 16 * width)
    return kept


def _largest(scaled: FloatArray, width: int) -> FloatArray:
    """Returns the `width` largest values of every row, descending, [num_rows, width]."""
    start = scaled.shape[1] - width
    largest = np.partition(scaled, start, axis=1)[:, start:] if start else scaled.copy()
    largest.sort(axis=1)
    return np.ascontiguousarray(largest[:, ::-1])


def _first_in_order(scaled: FloatArray, largest: FloatArray, counts: IntArray) -> BoolArray:
    """Keeps the first `counts` tokens of every row, most likely first, lower id first among equals."""
    least = np.take_along_axis(largest, counts[:, None] - 1, axis=1)
    above: BoolArray = scaled > least
    equal: BoolArray = scaled == least
    room = counts - (largest > least).sum(axis=1)
    crowded = np.flatnonzero(np.count_nonzero(equal, axis=1) > room)
    if crowded.size:
        equal[crowded] &= np.cumsum(equal[crowded], axis=1) <= room[crowded, None]
    return above | equal
