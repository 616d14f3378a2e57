"""What few bits make of keys and values: the reference that quality is measured with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cloister.backends.spec import DecoderSpec
from cloister.quant.base import FloatArray, KVDtype, NumberFormat, reciprocal

SHORTEST_INT4_HEAD = 64
"""Shorter heads are too coarse in 4 bits: of 32 numbers they cost 0.25 of perplexity (docs/quantization.md)."""


def choose_kv_dtype(number_format: NumberFormat, spec: DecoderSpec) -> KVDtype:
    """Returns what the KV cache of a model should hold beside weights in this format."""
    shortest = min(layer.attention.head_dim for layer in spec.layers)
    return "int8" if number_format.kv_dtype == "int4" and shortest < SHORTEST_INT4_HEAD else number_format.kv_dtype


def round_kv(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    """Returns keys or values [..., head_dim] as the cache gives them back.

    Every token's head has a scale of its own: in 8 bits its greatest magnitude over 127, in 4 bits a fifteenth of its range
    above its lowest value (as QServe: per head, dynamic, asymmetric).
    """
    if kv_dtype == "bfloat16":
        return heads.astype(ml_dtypes.bfloat16).astype(np.float32)
    lowest = np.float32(0) if kv_dtype == "int8" else heads.min(-1, keepdims=True)
    scale = _scales(heads, kv_dtype)
    rounded: FloatArray = np.rint((heads - lowest) * reciprocal(scale)) * scale + lowest
    return rounded


def _scales(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    scales: FloatArray
    if kv_dtype == "int8":
        scales = np.abs(heads).max(-1, keepdims=True) / np.float32(127)
    else:
        scales = np.ptp(heads, axis=-1, keepdims=True) / np.float32(15)
    return scales
