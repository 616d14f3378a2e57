"""Number formats: how weights are written in few bits, and how that is made to cost little. numpy only.

Importing this package registers every format in `FORMATS`.
"""

from cloister.backends.tensors import QuantizedTensor
from cloister.quant.base import FORMATS, FormatOptions, KVDtype, NumberFormat, read_activations
from cloister.quant.forward import choose_kv_dtype
from cloister.quant.int4 import make_int4
from cloister.quant.int8 import make_int8
from cloister.quant.qoq import make_qoq
from cloister.quant.weights import HeldWeights, QuantizedWeights, is_projection, quantize_on_read

__all__ = [
    "FORMATS",
    "FormatOptions",
    "HeldWeights",
    "KVDtype",
    "NumberFormat",
    "QuantizedTensor",
    "QuantizedWeights",
    "choose_kv_dtype",
    "is_projection",
    "make_int4",
    "make_int8",
    "make_qoq",
    "quantize_on_read",
    "read_activations",
]
