"""One prompt's vector as it grows: the last token's hidden state, or the mean over all, chunk after chunk.

A mean is summed in float64 one position after the other, so that neither chunking nor company changes a bit (rule 6).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cloister.backends.base import FloatArray
from cloister.types.request import Embedding, PoolingParams


class Pool:
    """What is known of one prompt's vector so far."""

    __slots__ = ("_num_seen", "_sum", "params")

    def __init__(self, params: PoolingParams) -> None:
        self.params = params
        self._sum: npt.NDArray[np.float64] | None = None
        self._num_seen = 0

    def add(self, rows: FloatArray) -> None:
        """Takes hidden states [num_rows, hidden] in the order of their positions."""
        if self._sum is None:
            self._sum = np.zeros(rows.shape[1])
        for row in rows:  # numpy may add up in another order, and in one that depends on how many there are
            self._sum += row
        self._num_seen += len(rows)

    def take(self) -> Embedding:
        """Returns the vector: the mean of what was added, cut and normalised as the request wants it."""
        assert self._sum is not None
        vector = (self._sum / self._num_seen)[: self.params.dimensions]
        if self.params.normalize:
            vector /= max(float(np.sqrt(np.square(vector).sum())), np.finfo(np.float64).tiny)
        return Embedding(vector.astype("<f4").tobytes())

    def wipe(self) -> None:
        """Overwrites the sum with zeros."""
        if self._sum is not None:
            self._sum[:] = 0
