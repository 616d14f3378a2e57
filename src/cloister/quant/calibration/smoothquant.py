"""Round-to-nearest; and SmoothQuant (Xiao et al. 2022), which moves activation outliers into the weights before it."""

from __future__ import annotations

import numpy as np

from cloister.backends.tensors import Tensor
from cloister.quant.base import THREAT, FloatArray, NumberFormat
from cloister.quant.calibration.base import CALIBRATORS, INPUTS_OF, Calibrator, LayerTrial
from cloister.quant.folding import AFTER_NORMS, FloatTensors, Folding, fold

_STRENGTH = 0.5  # equation 4's alpha: half of the difficulty on either side
_SMALLEST = 1e-5


class RoundToNearest(Calibrator):
    """Each weight on its own, with the format's own choice of scales."""

    name = "rtn"
    rotates = True
    uses_text = False

    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        return {name: number_format.quantize(tensor) if name in INPUTS_OF else tensor for name, tensor in tensors.items()}


class SmoothQuant(Calibrator):
    """The norms before q, k, v and before gate and up take the factors."""

    name = "smoothquant"
    rotates = False
    uses_text = True

    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        inputs = trial.watch(tensors, [folding.inputs for folding in AFTER_NORMS])
        for folding in AFTER_NORMS:
            factors = smoothing(inputs[folding.inputs].peaks, tensors, folding)
            tensors = fold(tensors, folding, factors, trial.layer.grouped_attention)
        return RoundToNearest().calibrate(tensors, trial, number_format)


def smoothing(peaks: FloatArray, tensors: FloatTensors, folding: Folding) -> FloatArray:
    """Returns s_j = max|X_j| ^ alpha / max|W_j| ^ (1 - alpha) for every input channel j, [in] (equation 4)."""
    columns = np.max([np.abs(tensors[f"{name}.weight"]).max(0) for name in folding.consumers], axis=0)
    inputs, weights = np.maximum(peaks, _SMALLEST), np.maximum(columns, _SMALLEST)
    factors: FloatArray = (inputs**_STRENGTH / weights ** (1 - _STRENGTH)).astype(np.float32)
    return factors


CALIBRATORS.register("rtn", THREAT)(RoundToNearest())
CALIBRATORS.register("smoothquant", THREAT)(SmoothQuant())
