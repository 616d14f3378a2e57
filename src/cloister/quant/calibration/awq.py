"""AWQ (Lin et al. 2023): scales up salient input channels, by factors found in a search, so that they lose less."""

from __future__ import annotations

import numpy as np

from cloister.backends.spec import LayerSpec
from cloister.backends.tensors import Tensor
from cloister.quant.base import THREAT, FloatArray, NumberFormat
from cloister.quant.calibration.base import CALIBRATORS, INPUTS_OF, Calibrator, InputStatistics, LayerTrial
from cloister.quant.folding import AFTER_NORMS, INSIDE, FloatTensors, Folding, fold, share_among_groups

_STRENGTHS = tuple(step / 10 for step in range(11))
_ROWS = 512  # outputs that a search looks at
_SMALLEST = 1e-4


class AWQ(Calibrator):
    """Factors first, then rounding that weighs errors by the inputs' squares."""

    name = "awq"
    rotates = False
    uses_text = True

    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        foldings, layer = (*AFTER_NORMS, *INSIDE), trial.layer
        inputs = trial.watch(tensors, [folding.inputs for folding in foldings])
        for folding in foldings:
            factors = search_factors(layer, tensors, folding, inputs[folding.inputs], number_format)
            tensors = fold(tensors, folding, factors, layer.grouped_attention)
            inputs[folding.inputs] = inputs[folding.inputs].divided_by(factors)
        return {
            name: number_format.quantize(tensor, inputs[INPUTS_OF[name]].mean_squares) if name in INPUTS_OF else tensor
            for name, tensor in tensors.items()
        }


def search_factors(
    layer: LayerSpec, tensors: FloatTensors, folding: Folding, inputs: InputStatistics, number_format: NumberFormat
) -> FloatArray:
    """Returns s = mean|X| ^ alpha, [in], for the alpha in 0 to 1 whose rounded weights err least (equations 4 and 5)."""
    weight = np.concatenate([_some_rows(tensors[f"{name}.weight"]) for name in folding.consumers])
    best, found = np.inf, np.ones(weight.shape[1], np.float32)
    for strength in _STRENGTHS:
        factors = np.maximum(inputs.mean_magnitudes, _SMALLEST) ** np.float32(strength)
        factors /= np.sqrt(factors.max() * factors.min())
        if folding.source == "v":
            factors = share_among_groups(factors, layer.grouped_attention)
        rounded = number_format.quantize(weight * factors, inputs.divided_by(factors).mean_squares)
        loss = output_error(rounded.dequantize() / factors - weight, inputs.gram)
        if loss < best:
            best, found = loss, factors
    return found


def output_error(error: FloatArray, gram: FloatArray) -> float:
    """Returns the summed squared error of the outputs, from that of a weight [out, in] and the inputs' Gram matrix."""
    return float(np.einsum("ok,ok->", error @ gram, error, dtype=np.float64))


def _some_rows(weight: FloatArray) -> FloatArray:
    return weight[:: max(1, len(weight) // _ROWS)]


CALIBRATORS.register("awq", THREAT)(AWQ())
