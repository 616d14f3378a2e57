"""Additions to the logits of named tokens: `logit_bias`, and the bar on stop tokens before `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitBias:
    """What to add to which tokens.

    Attributes:
        ids: [num_biased] distinct token ids.
        values: [num_biased] float32; -inf bars a token.
    """

    ids: npt.NDArray[np.int64]
    values: FloatArray

    @classmethod
    def bar(cls, ids: Sequence[int]) -> LogitBias:
        """Bars each of `ids`."""
        return cls(np.array(ids, np.int64), np.full(len(ids), -np.inf, np.float32))


def apply_bias(scores: FloatArray, rows: Sequence[int], biases: Sequence[LogitBias]) -> None:
    """Adds to `scores` [num_rows, vocab] in place: `biases[i]` to row `rows[i]`; no row is named twice."""
    row = np.repeat(np.asarray(rows), [bias.ids.size for bias in biases])
    ids = np.concatenate([bias.ids for bias in biases])
    scores[row, ids] += np.concatenate([bias.values for bias in biases])
