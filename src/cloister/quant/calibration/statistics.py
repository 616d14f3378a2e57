"""What calibration keeps of the text it ran: sums over its tokens, never a token's own values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import rotate_blocks
from cloister.quant.base import FloatArray


@dataclass(slots=True)
class InputStatistics:
    """Of one projection's inputs x [num_tokens, in], as they arrive in a model in few bits.

    Attributes:
        gram: [in, in] float32, the sum of x^T x over tokens.
        cross: [in, in] float32, the sum of y^T x, where y are the inputs of the same tokens in the float model.
        peaks: [in] greatest |x|.
        sums: [in] float64, the sum of |x|.
    """

    num_tokens: int
    gram: FloatArray
    cross: FloatArray
    peaks: FloatArray
    sums: npt.NDArray[np.float64]

    @classmethod
    def of(cls, num_inputs: int) -> InputStatistics:
        """Statistics of no token yet."""
        square = (num_inputs, num_inputs)
        return cls(
            num_tokens=0,
            gram=np.zeros(square, np.float32),
            cross=np.zeros(square, np.float32),
            peaks=np.zeros(num_inputs, np.float32),
            sums=np.zeros(num_inputs),
        )

    def add(self, rows: FloatArray, true_rows: FloatArray) -> None:
        """Takes in some tokens' inputs [num_tokens, in], here and in the float model."""
        magnitudes = np.abs(rows)
        self.num_tokens += len(rows)
        self.gram += rows.T @ rows
        self.cross += true_rows.T @ rows
        self.peaks = np.maximum(self.peaks, magnitudes.max(0))
        self.sums += magnitudes.sum(0)

    @property
    def mean_squares(self) -> FloatArray:
        """[in] mean of x^2: what a squared error of a weight costs, as far as its own input goes."""
        means: FloatArray = np.diagonal(self.gram) / np.float32(max(1, self.num_tokens))
        return means

    @property
    def mean_magnitudes(self) -> FloatArray:
        """[in] mean of |x|."""
        return (self.sums / max(1, self.num_tokens)).astype(np.float32)

    def rotated(self, rotation: int) -> FloatArray:
        """Returns the Gram matrix [in, in] of the inputs rotated in blocks of `rotation` (`backends.tensors.rotate_blocks`)."""
        return rotate_blocks(np.ascontiguousarray(rotate_blocks(self.gram, rotation).T), rotation)

    def divided_by(self, factors: FloatArray) -> InputStatistics:
        """Returns the statistics of the inputs divided by `factors` [in]."""
        gram, cross = (square / factors / factors[:, None] for square in (self.gram, self.cross))
        return InputStatistics(self.num_tokens, gram, cross, self.peaks / factors, self.sums / factors)
