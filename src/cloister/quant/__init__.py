"""Quantization formats: how weights are stored in few bits at little loss. numpy only.

Importing this package registers every format in `FORMATS`.
"""

from cloister.quant import integers, nvfp4, qoq
from cloister.quant.base import FORMATS, FormatOptions, KVDtype, NumberFormat, read_activations
from cloister.quant.forward import choose_kv_dtype
from cloister.quant.weights import HeldWeights, QuantizedWeights, is_projection, quantize_on_read

__all__ = [
    "FORMATS",
    "FormatOptions",
    "HeldWeights",
    "KVDtype",
    "NumberFormat",
    "QuantizedWeights",
    "choose_kv_dtype",
    "integers",
    "is_projection",
    "nvfp4",
    "qoq",
    "quantize_on_read",
    "read_activations",
]
