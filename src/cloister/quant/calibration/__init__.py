"""Calibration: quantization guided by sample text. Importing this package registers every method in `CALIBRATORS`."""

from cloister.quant.calibration import awq, gptq, smoothquant
from cloister.quant.calibration.base import CALIBRATORS, Calibrator
from cloister.quant.calibration.pipeline import calibrate

__all__ = ["CALIBRATORS", "Calibrator", "awq", "calibrate", "gptq", "smoothquant"]
