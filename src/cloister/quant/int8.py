"""int8: symmetric, one scale per output; activations rotated and quantized to int8 per token (W8A8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import GroupedTensor
from cloister.quant.base import FORMATS, THREAT, FloatArray, FormatOptions, KVDtype, choose_group_size, reciprocal, row_chunks

_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """Protocol `quant.base.NumberFormat`."""

    options: FormatOptions
    name: str = "int8"
    kv_dtype: KVDtype = "bfloat16"
    smooths_keys: bool = False
    wants_calibration: bool = False

    def quantize(self, weight: npt.NDArray[Any], importance: FloatArray | None = None) -> GroupedTensor:
        """Importance changes nothing: the greatest weight of an output sets its scale."""
        return quantize_rows(weight, self.options)

    def quantize_vocabulary(self, weight: npt.NDArray[Any]) -> GroupedTensor:
        return quantize_rows(weight, self.options)


@FORMATS.register("int8", THREAT)
def make_int8(options: FormatOptions) -> Int8:
    """Makes the format; it has no groups to choose."""
    choose_group_size(options.group_size, 0, (), "int8")
    return Int8(options)


def quantize_rows(weight: npt.NDArray[Any], options: FormatOptions) -> GroupedTensor:
    """Returns 8-bit codes of a matrix [out, in] with one scale per output, its greatest magnitude over 127."""
    num_out, num_in = weight.shape
    rotation = options.rotation_of(num_in)
    codes, scales = np.empty((num_out, num_in), np.uint8), np.empty((num_out, 1), np.float32)
    for rows, chunk in row_chunks(weight, rotation):
        scales[rows] = np.abs(chunk).max(1, keepdims=True) / np.float32(_LARGEST)
        levels = chunk * reciprocal(scales[rows])
        codes[rows] = np.clip(np.rint(levels, out=levels), -_LARGEST, _LARGEST, out=levels) + np.float32(128)
    activations = options.activations or "int8"
    return GroupedTensor(codes, scales, None, None, 8, num_in, activations, rotation=rotation)
