"""A whole model through calibration, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cloister.backends.base import Weights
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import Tensor, dequantized
from cloister.quant.base import NumberFormat, without_rotation
from cloister.quant.calibration.base import Calibrator, LayerTrial
from cloister.quant.folding import FloatTensors, key_factors
from cloister.quant.forward import check_forward
from cloister.quant.quality import IntArray, embed, layer_tensors
from cloister.quant.smooth_attention import smoothing_factors
from cloister.quant.weights import VOCABULARY, QuantizedWeights, quantize_on_read


def calibrate(
    spec: DecoderSpec, weights: Weights, windows: IntArray, number_format: NumberFormat, calibrator: Calibrator
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a model under its canonical name, matrices in the format; layers come in order.

    Text runs through a layer in float and in the format side by side, so that every layer learns to live with what those before
    it really give it.

    Args:
        windows: [num_windows, length] token ids of the calibration text.

    Raises:
        ConfigError: the calibrator uses text, and the model is not of a shape that text runs through (`limits`).
    """
    if not calibrator.rotates:
        number_format = without_rotation(number_format)
    if not calibrator.uses_text:
        yield from quantize_on_read(spec, weights, number_format)
        return
    check_forward(spec)
    for name in weights.names():
        if not name.startswith("layers."):
            tensor = weights.read(name)
            yield name, number_format.quantize_vocabulary(dequantized(tensor)) if name in VOCABULARY else tensor
    true_hidden, hidden = embed(spec, weights, windows), embed(spec, QuantizedWeights(weights, number_format), windows)
    for number, layer in enumerate(spec.layers):
        tensors: FloatTensors = {
            name: np.asarray(dequantized(tensor), np.float32) for name, tensor in layer_tensors(weights, number).items()
        }
        trial = LayerTrial(layer, tensors, true_hidden, hidden, spec.norm_eps, number_format.kv_dtype)
        start = _smooth_keys(tensors, trial) if number_format.smooths_keys else tensors
        found = calibrator.calibrate(start, trial, number_format)
        trial.advance(found)
        yield from ((f"layers.{number}.{name}", tensor) for name, tensor in found.items())


def _smooth_keys(tensors: FloatTensors, trial: LayerTrial) -> FloatTensors:
    factors = key_factors(smoothing_factors(trial.key_sizes(), trial.layer), trial.layer)
    return {name: tensor * factors[name] if name in factors else tensor for name, tensor in tensors.items()}
