"""What few bits make of keys and values: the reference that quality is measured with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cloister.quant.base import FloatArray, KVDtype, reciprocal


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
