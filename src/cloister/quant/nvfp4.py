"""NVFP4: E2M1 numbers of 4 bits, 16 of which share an E4M3 scale, and one factor for a tensor; inputs in bfloat16.

The numbers are those of OCP Microscaling Formats 1.0, section 5.3.3. The factor is a power of two, so that it rounds nothing:
a weight does not depend on the greatest of the tensor, unless its group's scale falls below what E4M3 has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import GroupedTensor
from cloister.quant.base import (
    FORMATS,
    THREAT,
    FloatArray,
    FormatOptions,
    NumberFormat,
    choose_group_size,
    from_columns,
    quantize_rows,
    reciprocal,
    row_chunks,
    to_columns,
)
from cloister.types.errors import ConfigError

GROUP = 16
_ZERO = np.float32(128)
_GREATEST_NUMBER, _GREATEST_SCALE = 6, 448
_GREATEST_BYTE = 126  # of E4M3; 127 is no number
_LEAST_EXPONENT = -126  # of a normal number of float32: what is smaller becomes 0
_CANDIDATES = range(-1, 5)
"""E4M3 numbers that are tried, counted from the one at which a group's greatest weight is 6: four further on it is about 4,
where numbers lie closer to one another (Cook et al. 2025, "Four Over Six")."""


@dataclass(frozen=True, slots=True)
class NVFP4(NumberFormat):
    """The format."""

    name = "nvfp4"

    def quantize(self, weight: npt.NDArray[Any], importance: FloatArray | None = None) -> GroupedTensor:
        """A matrix whose inputs 16 does not divide gets 8 bits and one scale per output."""
        if weight.shape[1] % GROUP:
            return self.quantize_vocabulary(weight)
        return quantize_floats(weight, importance)

    def quantize_vocabulary(self, weight: npt.NDArray[Any]) -> GroupedTensor:
        """8 bits and one scale per token, as in every format; these meet rounded inputs."""
        return quantize_rows(weight, replace(self.options, activations=None))


@FORMATS.register("nvfp4", THREAT)
def make_nvfp4(options: FormatOptions) -> NVFP4:
    """Makes the format; it has no groups to choose."""
    choose_group_size(options.group_size, GROUP, (GROUP,), "nvfp4")
    if options.activations not in (None, "bfloat16"):
        raise ConfigError("the number format nvfp4 computes with bfloat16 activations only", param="activations")
    return NVFP4(replace(options, activations="bfloat16"))


def quantize_floats(weight: npt.NDArray[Any], importance: FloatArray | None = None) -> GroupedTensor:
    """Returns NVFP4 of a matrix [out, in], for each group the scale of least squared error among a few."""
    num_out, num_in = weight.shape
    num_groups = num_in // GROUP
    factor = choose_factor(max(float(np.abs(chunk).max()) for _, chunk in row_chunks(weight)))
    codes, scales = np.empty((num_out, num_in), np.uint8), np.empty((num_out, num_groups), np.float32)
    for rows, chunk in row_chunks(weight):
        groups = to_columns(chunk / factor, GROUP)
        costs = None if importance is None else np.tile(importance.reshape(num_groups, GROUP).T, len(chunk))
        found = search_scales(groups, costs)
        levels = round_to_e2m1(groups * reciprocal(found))
        codes[rows] = from_columns((levels + _ZERO).astype(np.uint8), len(chunk))
        scales[rows] = found.reshape(len(chunk), num_groups)
    factors = np.full(num_out, factor, np.float32)
    return GroupedTensor(codes, scales, None, None, 8, GROUP, "bfloat16", output_scales=factors, is_nvfp4=True)


def choose_factor(peak: float) -> np.float32:
    """Returns the least power of two with which a weight of magnitude `peak` has a scale; 1 where all are zero."""
    exponent = np.ceil(np.log2(peak / (_GREATEST_NUMBER * _GREATEST_SCALE))) if peak else 0
    return np.float32(2.0 ** max(int(exponent), _LEAST_EXPONENT))


def search_scales(groups: FloatArray, costs: FloatArray | None) -> FloatArray:
    """Returns half of the E4M3 scale of each group, [num_groups]: codes are twice the numbers that they stand for.

    Args:
        groups: [16, num_groups] weights over the tensor's factor.
        costs: the same shape, or None for 1.
    """
    sizes = np.abs(groups)
    ideal = (sizes.max(0) / np.float32(_GREATEST_NUMBER)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    best, scales = np.full(groups.shape[1], np.inf, np.float32), np.zeros(groups.shape[1], np.float32)
    for offset in _CANDIDATES:
        stored = np.clip(ideal.astype(np.int16) + offset, 0, _GREATEST_BYTE).astype(np.uint8)
        halves = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.5)
        errors = _round_sizes(sizes * reciprocal(halves))
        errors *= halves
        errors -= sizes
        loss = np.einsum("kn,kn->n", errors, errors if costs is None else errors * costs)
        better = loss < best
        np.copyto(best, loss, where=better)
        np.copyto(scales, halves, where=better)
    return scales


def round_to_e2m1(levels: FloatArray) -> FloatArray:
    """Returns the nearest of 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, twice the numbers of E2M1; between two, the even."""
    rounded: FloatArray = np.copysign(_round_sizes(np.abs(levels)), levels)
    return rounded


def _round_sizes(sizes: FloatArray) -> FloatArray:
    """Rounds numbers that are not negative, in place: to a quarter of the power of two above each, but to 1 at the finest."""
    np.minimum(sizes, np.float32(12), out=sizes)
    powers = (sizes.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    np.maximum(powers, np.float32(2), out=powers)
    powers *= np.float32(0.75 * 2**23)  # half a power is the step; adding 1.5 * 2^23 steps rounds to whole ones
    sizes += powers
    sizes -= powers
    return sizes
