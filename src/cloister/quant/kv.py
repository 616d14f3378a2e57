"""What few bits make of keys and values: the reference that quality is measured with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cloister.quant.base import FloatArray, KVDtype, reciprocal

_LEVELS = {"int8": 255, "int4": 15}


def round_kv(heads: FloatArray, kv_dtype: KVDtype) -> FloatArray:
    """Returns keys or values [..., head_dim] as the cache gives them back.

    In few bits every token's head has a scale and a lowest value of its own, both in float16, and unsigned codes (QServe,
    section 4.2: per head, dynamic, asymmetric).
    """
    if kv_dtype == "bfloat16":
        return heads.astype(ml_dtypes.bfloat16).astype(np.float32)
    lowest = _half(heads.min(-1, keepdims=True))
    scale = _half((heads.max(-1, keepdims=True) - lowest) / np.float32(_LEVELS[kv_dtype]))
    codes = np.clip(np.rint((heads - lowest) * reciprocal(scale)), 0, _LEVELS[kv_dtype])
    rounded: FloatArray = codes * scale + lowest
    return rounded


def _half(values: FloatArray) -> FloatArray:
    halves: FloatArray = values.astype(np.float16).astype(np.float32)
    return halves
