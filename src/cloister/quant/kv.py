"""What few bits make of keys and values: the reference that quality is measured with."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from cloister.backends.spec import DecoderSpec
from cloister.backends.tensors import rotate_blocks
from cloister.quant.base import FloatArray, KVDtype, NumberFormat, reciprocal

GROUP_DIMS = 64
"""Dimensions of a head that share a scale."""
_ROTATIONS = (64, 16)
SHORTEST_INT4_HEAD = 64
"""In shorter heads 4-bit values save next to nothing: their scales take as much (docs/quantization.md)."""


def choose_kv_dtype(number_format: NumberFormat, spec: DecoderSpec) -> KVDtype:
    """Returns what the KV cache of a model should hold beside weights in this format."""
    shortest = min(layer.attention.head_dim for layer in spec.layers)
    return "int8" if number_format.kv_dtype == "int4" and shortest < SHORTEST_INT4_HEAD else number_format.kv_dtype


def round_keys(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    """Returns keys [..., head_dim] as the cache gives them back: in 8 bits both in "int8" and in "int4".

    Heads are rotated (`backends.tensors.rotate_blocks`), and each group of 64 dimensions has a scale of its own: its greatest
    magnitude over 127.
    """
    return _round_numbers(heads) if kv_dtype == "bfloat16" else _round_rotated(heads, _round_to_int8)


def round_values(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    """Returns values [..., head_dim] as the cache gives them back.

    In "int8" like keys; in "int4" a group has a scale, a fifteenth of its range, above its lowest value (QServe, Lin et al.
    2024, section 5.3).
    """
    if kv_dtype == "bfloat16":
        return _round_numbers(heads)
    return _round_rotated(heads, _round_to_int8 if kv_dtype == "int8" else _round_to_int4)


def _round_numbers(heads: FloatArray) -> FloatArray:
    return heads.astype(ml_dtypes.bfloat16).astype(np.float32)


def _round_rotated(heads: FloatArray, rounded: Callable[[FloatArray], FloatArray]) -> FloatArray:
    rotation = next((size for size in _ROTATIONS if heads.shape[-1] % size == 0), 0)
    rotated = rotate_blocks(np.asarray(heads, np.float32), rotation)
    cuts = range(GROUP_DIMS, heads.shape[-1], GROUP_DIMS)
    groups = [rounded(group) for group in np.split(rotated, cuts, axis=-1)]
    return rotate_blocks(np.concatenate(groups, axis=-1), rotation)


def _round_to_int8(group: FloatArray) -> FloatArray:
    scale = np.abs(group).max(-1, keepdims=True) / np.float32(127)
    rounded: FloatArray = np.rint(group * reciprocal(scale)) * scale
    return rounded


def _round_to_int4(group: FloatArray) -> FloatArray:
    lowest = group.min(-1, keepdims=True)
    scale = np.ptp(group, axis=-1, keepdims=True) / np.float32(15)
    rounded: FloatArray = np.rint((group - lowest) * reciprocal(scale)) * scale + lowest
    return rounded
