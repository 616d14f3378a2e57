"""QoQ (Lin et al. 2024, QServe): 4-bit weights expanded to int8, int8 activations, a 4-bit KV cache (W4A8KV4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import ProgressiveTensor, QuantizedTensor
from cloister.quant.base import (
    FORMATS,
    THREAT,
    FloatArray,
    FormatOptions,
    NumberFormat,
    choose_group_size,
    fit_group_size,
    from_columns,
    reciprocal,
    row_chunks,
    to_columns,
)
from cloister.quant.integers import Int4
from cloister.types.errors import ConfigError

GROUP_SIZES = (32, 64, 128)
PROTECTIVE_RANGE = 119
"""Greatest int8 level before the second step (section 4.1): rounding to a multiple of a group scale of 16 adds 8 at most."""
_LARGEST_CODE, _LARGEST_SCALE = 15, 16
_MULTIPLE = 32
_STEPS_BELOW = 2  # group scales tried below the one that clips nothing


@dataclass(frozen=True, slots=True)
class QoQ(NumberFormat):
    """The format, with its group size."""

    name = "qoq"
    kv_dtype = "int4"
    smooths_keys = True
    group_size: int

    def quantize(self, weight: npt.NDArray[Any], importance: FloatArray | None = None) -> QuantizedTensor:
        """A matrix whose inputs 32 does not divide is written as `int4` would."""
        group_size = fit_group_size(weight.shape[1], self.group_size, _MULTIPLE)
        if group_size is None:
            return Int4(self.options, self.group_size).quantize(weight, importance)
        return quantize_progressively(weight, group_size, self.options, importance)


@FORMATS.register("qoq", THREAT)
def make_qoq(options: FormatOptions) -> QoQ:
    """Makes the format; groups of 128 unless chosen otherwise."""
    if options.activations not in (None, "int8"):
        raise ConfigError("the number format qoq computes with int8 activations only", param="activations")
    return QoQ(options, choose_group_size(options.group_size, 128, GROUP_SIZES, "qoq"))


def quantize_progressively(
    weight: npt.NDArray[Any], group_size: int, options: FormatOptions, importance: FloatArray | None = None
) -> ProgressiveTensor:
    """Returns the two levels of a matrix [out, in]: channel scales first, then groups of their int8 in 4 bits.

    The 4-bit codes are rounded from the weight itself, not from its int8 level: what is rounded once errs less.
    """
    num_out, num_in = weight.shape
    shape, rotation = (num_out, num_in // group_size), options.rotation_of(num_in)
    codes, channel_scales = np.empty((num_out, num_in), np.uint8), np.empty(num_out, np.float32)
    group_scales, zeros = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
    for rows, chunk in row_chunks(weight, rotation):
        channel_scales[rows] = np.abs(chunk).max(1) / np.float32(PROTECTIVE_RANGE)
        groups = to_columns(chunk * reciprocal(channel_scales[rows])[:, None], group_size)
        costs = None if importance is None else np.tile(importance.reshape(-1, group_size).T, len(chunk))
        found = search_groups(groups, costs)
        codes[rows] = from_columns(found.codes, len(chunk))
        group_scales[rows] = found.scales.reshape(len(chunk), -1)
        zeros[rows] = found.zeros.reshape(len(chunk), -1)
    return ProgressiveTensor(codes, channel_scales, group_scales, zeros, group_size, rotation)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Codes [group_size, num_groups], scales and zeros [num_groups] of the second level."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    zeros: npt.NDArray[np.uint8]


def search_groups(groups: FloatArray, costs: FloatArray | None) -> _Groups:
    """Chooses each group's whole-numbered scale and zero for the least squared error, the widest scale or a few below it.

    Args:
        groups: [group_size, num_groups] weights over their channel's scale, -119 to 119.
        costs: the same shape, or None for 1.
    """
    highest, lowest = np.maximum(groups.max(0), 0), np.minimum(groups.min(0), 0)
    widest = np.clip(np.ceil((highest - lowest) / np.float32(_LARGEST_CODE)), 1, _LARGEST_SCALE)
    best = np.full_like(highest, np.inf)
    scales, zeros = widest.copy(), np.zeros_like(widest)
    for below in range(_STEPS_BELOW + 1):
        scale = np.maximum(widest - below, 1)
        zero = _zero(highest, lowest, scale)
        error = (_levels(groups, scale, zero) - zero) * scale - groups
        loss = np.einsum("kn,kn->n", error, error if costs is None else error * costs)
        better = loss < best
        np.copyto(best, loss, where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(zeros, zero, where=better)
    codes = _levels(groups, scales, zeros).astype(np.uint8)
    return _Groups(codes, scales.astype(np.uint8), zeros.astype(np.uint8))


def _zero(highest: FloatArray, lowest: FloatArray, scale: FloatArray) -> FloatArray:
    """The code of 0: what is clipped, where the scale is too fine for the group, is clipped on both sides alike."""
    excess = np.maximum(highest - lowest - scale * np.float32(_LARGEST_CODE), 0) / 2
    return np.clip(np.rint(-(lowest + excess) / scale), 0, _LARGEST_CODE)


def _levels(groups: FloatArray, scale: FloatArray, zero: FloatArray) -> FloatArray:
    levels = groups * (np.float32(1) / scale)
    np.rint(levels, out=levels)
    levels += zero
    return np.clip(levels, 0, _LARGEST_CODE, out=levels)
