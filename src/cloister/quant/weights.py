"""Quantizes weights as they are read, matrix by matrix, so that no second copy of the model is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cloister.backends.base import Weights
from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import GroupedTensor, ProgressiveTensor, QuantizedTensor, Tensor, take_rows
from cloister.quant.base import NumberFormat
from cloister.quant.smooth_attention import SmoothedKeys

PROJECTIONS = frozenset(("q", "q_gate", "k", "v", "q_a", "q_b", "kv_a", "o", "gate", "up", "down", "in", "z", "out"))
"""Not kv_b, which latent attention takes apart into the matrices that it absorbs; of mixers with a state, the large ones."""
VOCABULARY = frozenset(("embed.weight", "head.weight"))


def is_projection(name: str) -> bool:
    """Whether a canonical name is that of a layer's or an expert's matrix (`backends.base` lists the names)."""
    parts = name.split(".")
    return parts[0] == "layers" and parts[-2] in PROJECTIONS and parts[-1] == "weight"


def quantize_tensor(name: str, tensor: Tensor, number_format: NumberFormat) -> Tensor:
    """Returns what a format makes of one tensor: norms and biases, and what has few bits already, stay as they are."""
    if isinstance(tensor, GroupedTensor | ProgressiveTensor):
        return tensor
    if is_projection(name):
        return number_format.quantize(tensor)
    return number_format.quantize_vocabulary(tensor) if name in VOCABULARY else tensor


class HeldWeights(Weights):
    """Tensors in memory by canonical name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def form(self, name: str) -> QuantizedTensor | None:
        tensor = self._tensors[name]
        return None if isinstance(tensor, np.ndarray) else take_rows(tensor, slice(0, 1))

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class QuantizedWeights(Weights):
    """Other weights in a number format."""

    def __init__(self, weights: Weights, number_format: NumberFormat) -> None:
        self._weights, self._format = weights, number_format

    def names(self) -> Sequence[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def form(self, name: str) -> QuantizedTensor | None:
        stored = self._weights.form(name)
        if stored is not None or not (is_projection(name) or name in VOCABULARY):
            return stored
        row = np.zeros((1, self._weights.shape(name)[1]), np.float32)
        written = quantize_tensor(name, row, self._format)
        return None if isinstance(written, np.ndarray) else written

    def read(self, name: str) -> Tensor:
        return quantize_tensor(name, self._weights.read(name), self._format)


def quantize_on_read(spec: DecoderSpec, weights: Weights, number_format: NumberFormat) -> QuantizedWeights:
    """Returns weights in a number format, without calibration; keys are smoothed first if the format wants that."""
    return QuantizedWeights(SmoothedKeys(spec, weights) if number_format.smooths_keys else weights, number_format)
