"""int8 and int4: symmetric, one scale for an output or for a group of consecutive inputs.

int8: activations are rotated and quantized to int8 per token (W8A8). int4: activations in int8 (W4A8) or bfloat16 (W4A16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    fit_group_size,
    from_columns,
    quantize_rows,
    reciprocal,
    row_chunks,
    to_columns,
)

GROUP_SIZES = (32, 64, 128)
_LOWEST, _HIGHEST = -8, 7
_MULTIPLE = 16  # kernels read 16 inputs at least under one scale
_PEAKS = (-8.0, -8.75, -7.25)
"""Levels that the weight of greatest magnitude in a group may be put at before rounding. Scales may be negative, so that it
can always stand on the side with eight levels; past -8 it is clipped and the others are finer."""


@dataclass(frozen=True, slots=True)
class Int8(NumberFormat):
    """The format; its one scale per output asks for no calibration."""

    name = "int8"
    wants_calibration = False

    def quantize(self, weight: npt.NDArray[Any], importance: FloatArray | None = None) -> GroupedTensor:
        """Importance changes nothing: the greatest weight of an output sets its scale."""
        return quantize_rows(weight, self.options)


@FORMATS.register("int8", THREAT)
def make_int8(options: FormatOptions) -> Int8:
    """Makes the format; it has no groups to choose."""
    choose_group_size(options.group_size, 0, (), "int8")
    return Int8(options)


@dataclass(frozen=True, slots=True)
class Int4(NumberFormat):
    """The format, with its group size."""

    name = "int4"
    group_size: int

    def quantize(self, weight: npt.NDArray[Any], importance: FloatArray | None = None) -> GroupedTensor:
        """A matrix whose inputs 16 does not divide gets 8 bits and one scale per output."""
        group_size = fit_group_size(weight.shape[1], self.group_size, _MULTIPLE)
        if group_size is None:
            return quantize_rows(weight, self.options)
        return quantize_groups(weight, group_size, self.options, importance)


@FORMATS.register("int4", THREAT)
def make_int4(options: FormatOptions) -> Int4:
    """Makes the format; groups of 32 unless chosen otherwise."""
    return Int4(options, choose_group_size(options.group_size, 32, GROUP_SIZES, "int4"))


def quantize_groups(
    weight: npt.NDArray[Any], group_size: int, options: FormatOptions, importance: FloatArray | None = None
) -> GroupedTensor:
    """Returns 4-bit codes of a matrix [out, in]; scales are numbers of float16, as kernels keep them."""
    num_out, num_in = weight.shape
    num_groups, rotation = num_in // group_size, options.rotation_of(num_in)
    codes, scales = np.empty((num_out, num_in), np.uint8), np.empty((num_out, num_groups), np.float32)
    for rows, chunk in row_chunks(weight, rotation):
        groups = to_columns(chunk, group_size)
        costs = None if importance is None else np.tile(importance.reshape(num_groups, group_size).T, len(chunk))
        found = round_to_half(search_scales(groups, costs))
        levels = _round(groups, reciprocal(found))
        levels -= _LOWEST
        codes[rows] = from_columns(levels.astype(np.uint8), len(chunk))
        scales[rows] = found.reshape(len(chunk), num_groups)
    activations = options.activations or "int8"
    return GroupedTensor(codes, scales, None, None, 4, group_size, activations, rotation=rotation)


def search_scales(groups: FloatArray, costs: FloatArray | None) -> FloatArray:
    """Returns the scale of each group, [num_groups], that loses the least squares among a few.

    For levels q of weights w and costs c the best scale is (c w . q) / (c q . q), and it explains (c w . q)^2 / (c q . q) of
    the squares: so each candidate costs one rounding and two products, and no error is ever formed.

    Args:
        groups: [group_size, num_groups].
        costs: the same shape, or None for 1.
    """
    highest, lowest = groups.max(0), groups.min(0)
    peaks: FloatArray = np.where(highest > -lowest, highest, lowest)
    inverse = reciprocal(peaks)
    weighted = groups if costs is None else groups * costs
    best, scales = np.full_like(peaks, -1), np.zeros_like(peaks)
    for peak in _PEAKS:
        levels = _round(groups, inverse * np.float32(peak))
        cross = np.einsum("kn,kn->n", weighted, levels)
        square = np.einsum("kn,kn->n", levels, levels if costs is None else levels * costs)
        candidates = cross * reciprocal(square)
        explained = candidates * cross
        better = explained > best
        np.copyto(best, explained, where=better)
        np.copyto(scales, candidates, where=better)
    return scales


def round_to_half(scales: FloatArray) -> FloatArray:
    """Returns the nearest finite numbers of float16."""
    limit = float(np.finfo(np.float16).max)
    halves: FloatArray = np.clip(scales, -limit, limit).astype(np.float16).astype(np.float32)
    return halves


def _round(groups: FloatArray, inverse: FloatArray) -> FloatArray:
    levels = groups * inverse
    np.rint(levels, out=levels)
    np.clip(levels, _LOWEST, _HIGHEST, out=levels)
    return levels
