"""Rounding to nearest: each weight on its own, with the format's own choice of scales."""

from __future__ import annotations

from cloister.backends.tensors import Tensor
from cloister.quant.base import THREAT, NumberFormat
from cloister.quant.calibration.base import CALIBRATORS, INPUTS_OF, LayerTrial
from cloister.quant.folding import FloatTensors


class RoundToNearest:
    """Protocol `calibration.base.Calibrator`."""

    name = "rtn"
    rotates = True
    uses_text = False

    def calibrate(self, tensors: FloatTensors, trial: LayerTrial, number_format: NumberFormat) -> dict[str, Tensor]:
        return {name: number_format.quantize(tensor) if name in INPUTS_OF else tensor for name, tensor in tensors.items()}


CALIBRATORS.register("rtn", THREAT)(RoundToNearest())
