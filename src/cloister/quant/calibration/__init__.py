"""Calibration: quantization guided by sample text. Importing this package registers every method in `CALIBRATORS`."""

from cloister.quant.calibration.awq import AWQ
from cloister.quant.calibration.base import CALIBRATORS, Calibrator
from cloister.quant.calibration.gptq import GPTQ
from cloister.quant.calibration.pipeline import calibrate
from cloister.quant.calibration.rtn import RoundToNearest
from cloister.quant.calibration.smoothquant import SmoothQuant

__all__ = ["AWQ", "CALIBRATORS", "GPTQ", "Calibrator", "RoundToNearest", "SmoothQuant", "calibrate"]
