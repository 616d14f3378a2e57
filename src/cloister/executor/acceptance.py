"""Distribution-preserving verification of sampled drafts: accept with min(1, p / q), else continue with the residual of p over
q.

Leviathan et al. 2023, section 2.3, for one draft; Miao et al. 2024 (SpecInfer), algorithm 3, for several candidates. Pure.

Why it is exact. Let p be the target distribution of the token, and x be drawn from q, independent of the uniform u. Token y is
the accepted x with probability q(y) min(1, p(y) / q(y)) = min(p(y), q(y)). Everything else, 1 - sum min(p, q) = sum (p - q)+,
is rejected, and then y has probability (p - q)+(y) / sum (p - q)+: the sum of both is p(y). The residual is a distribution too,
so the next candidate is verified against it in the same way, and after the last one a token is drawn from it. All this holds
conditioned on the tokens of earlier candidates, so a candidate may be drawn from a q that depends on them (for example without
their tokens: Jeon et al. 2024), or not be drawn at all (q is then a point mass: x is accepted with p(x)). It does not hold if a
candidate is dropped or moved depending on its value; so a token that was drawn twice is verified twice, at its own positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cloister.backends.base import SamplingMetadata
from cloister.executor.noise import UniformArray
from cloister.executor.sampling import kept_tokens, row_pieces

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Candidate(NamedTuple):
    """A token that may follow a node.

    Attributes:
        place: index of its node in the draft.
        probs: [vocab] distribution that it was drawn from, given the earlier candidates; None if it was not drawn.
    """

    place: int
    token: int
    probs: FloatArray | None


def distribution(scores: FloatArray, draws: SamplingMetadata) -> FloatArray:
    """Returns the distributions that `executor.sampling.Sampler` draws from.

    Args:
        scores: [num_rows, vocab] logits after penalties, bias, masked stop tokens and grammars; not modified.
        draws: [num_rows] of `SAMPLING_METADATA`; row i specifies how the token of scores[i] is chosen; its `row` is ignored.

    Returns:
        [num_rows, vocab]; rows sum to 1 within rounding, one without a token to choose is all zeros.
    """
    probs = np.zeros(scores.shape, np.float32)
    for piece in row_pieces(*scores.shape):
        _fill(probs[piece], scores[piece], draws[piece])
    return probs


def _fill(probs: FloatArray, scores: FloatArray, draws: SamplingMetadata) -> None:
    tokens = scores.argmax(axis=1)
    best = scores[np.arange(len(tokens)), tokens]
    choosable = np.isfinite(best)
    greedy = np.flatnonzero(choosable & (draws["temperature"] <= 0))
    probs[greedy, tokens[greedy]] = 1
    drawn = np.flatnonzero(choosable & (draws["temperature"] > 0))
    if not drawn.size:
        return
    # in place if possible: allocating some hundred kilobytes costs more than the computation
    with np.errstate(over="ignore"):  # a cold temperature sends unlikely tokens to -inf, which is right
        scaled = np.subtract(scores if drawn.size == len(scores) else scores[drawn], best[drawn, None])
        scaled /= draws["temperature"][drawn, None]
    columns = draws[drawn]
    is_filtered = ((columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)).any()
    weights = np.exp(scaled, out=None if is_filtered else scaled)
    if is_filtered:
        weights[~kept_tokens(scaled, columns["top_k"], columns["top_p"], columns["min_p"])] = 0
    weights /= weights.sum(axis=1, dtype=np.float64, keepdims=True).astype(np.float32)
    probs[drawn] = weights


def draw_from(probs: FloatArray, numbers: UniformArray) -> IntArray:
    """Draws one token per row.

    Args:
        probs: [num_rows, vocab], non-negative; need not sum to 1.
        numbers: [num_rows], uniform in [0, 1).

    Returns:
        [num_rows] token ids, none of weight 0; -1 for a row of zeros.
    """
    return np.array([_draw(row, number) for row, number in zip(probs, numbers.tolist(), strict=True)], np.int64)


def draw_rivals(probs: FloatArray, numbers: UniformArray) -> tuple[list[int], FloatArray]:
    """Draws distinct tokens, each without the previous ones.

    Args:
        probs: [vocab], non-negative.
        numbers: [num_rivals], uniform in [0, 1).

    Returns:
        Token ids, at most as many as have a probability above 0, and the distribution that each was drawn from, [num_tokens,
            vocab]. They are candidates of one node in this order.
    """
    left = probs.astype(np.float64)
    count = min(len(numbers), int(np.count_nonzero(left)))
    tokens, rows = [], np.empty((count, len(probs)), np.float32)
    for place in range(count):
        rows[place] = left / left.sum()
        tokens.append(_draw(left, float(numbers[place])))
        left[tokens[-1]] = 0
    return tokens, rows


def accept_child(probs: FloatArray, candidates: Sequence[Candidate], numbers: Sequence[float]) -> tuple[int | None, int]:
    """Decides on the token after one node.

    Args:
        probs: [vocab] target distribution of the token.
        candidates: in the order in which they were drawn.
        numbers: one for each candidate and one more, uniform in [0, 1), independent of the numbers that the candidates were
            drawn with.

    Returns:
        The index of the accepted candidate and its token; or None and a token drawn from the residual, -1 if `probs` is all
            zeros.
    """
    left: FloatArray | npt.NDArray[np.float64] = probs
    for candidate, number in zip(candidates, numbers, strict=False):
        drawn_with = 1.0 if candidate.probs is None else float(candidate.probs[candidate.token])
        if number * drawn_with < left[candidate.token]:
            return candidate.place, candidate.token
        left = _less(left, candidate)
    return None, _draw(left, numbers[len(candidates)])


def _less(probs: FloatArray | npt.NDArray[np.float64], candidate: Candidate) -> npt.NDArray[np.float64]:
    """Returns the normalised residual of a distribution over a candidate's.

    If the residual is empty, both are equal up to rounding, so the rejection was a rounding error too: the distribution is
    unchanged.
    """
    left = probs.astype(np.float64)
    if candidate.probs is None:
        left[candidate.token] = 0
    else:
        left -= candidate.probs
        np.maximum(left, 0, out=left)
    total = left.sum()
    if total <= 0:
        return probs.astype(np.float64)
    left /= total
    return left


def _draw(probs: FloatArray | npt.NDArray[np.float64], number: float) -> int:
    """Draws a token in proportion to its weight; -1 if the sum is 0."""
    shares = probs.cumsum(dtype=np.float64)
    total = shares[-1]
    if not total > 0:
        return -1
    token = int(shares.searchsorted(number * total, "right"))
    # the product may round up to the sum itself: then take the last token with a weight
    return token if token < len(probs) else int(probs.nonzero()[0][-1])
