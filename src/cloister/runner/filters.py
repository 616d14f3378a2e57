"""Truncation of the distribution: top-k, then top-p (Holtzman et al. 2020), then min-p (Nguyen et al. 2024).

Every decision is made on a row's own sorted values, so it cannot depend on the other rows of the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

_FIRST_WIDTH = 512


def kept_tokens(
    scaled: FloatArray, top_k: IntArray, top_p: npt.NDArray[np.float64], min_p: npt.NDArray[np.float64]
) -> BoolArray:
    """Says which tokens may be drawn.

    Args:
        scaled: [num_rows, vocab] logits after temperature, less the row's largest (which becomes 0).
        top_k: [num_rows], 0 is off. Of equal tokens the lower ids stay, so exactly k do.
        top_p: [num_rows], 1 is off. The smallest set of most likely tokens whose mass is at least top_p stays.
        min_p: [num_rows], 0 is off. Tokens at least min_p times as likely as the most likely one stay.

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
    """Keeps at most `limits` tokens per row, and no more than reach the mass `top_p`.

    Looks at the `width` largest values first, and at more when a row's limit or mass asks for more.
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
