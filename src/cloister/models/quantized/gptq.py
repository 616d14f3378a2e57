"""GPTQ checkpoints (AutoGPTQ, GPTQModel): 4 or 8 bits, packed along inputs, act-order by g_idx.

`qweight [in * bits / 32, out]`, `qzeros [groups, out * bits / 32]`, `scales [groups, out]`, `g_idx [in]`. Files of format 1
hold each zero less one, modulo 2 ** bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import GroupedTensor
from cloister.models.config import ConfigFields
from cloister.models.quantized.base import (
    Parts,
    Stored,
    StoredMatrix,
    form_row,
    read_order,
    resolve_group_size,
    unless_symmetric,
    unpack_rows,
)
from cloister.models.safetensors import FLOATS, TensorEntry
from cloister.types.errors import ModelError

BITS = (4, 8)
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
_RECORDS = (  # of how the codes were found; they are as they are
    "desc_act", "sym", "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "mse", "meta", "dataset",
    "tokenizer", "batch_size", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_not_convert", "pad_token_id", "model_name_or_path", "model_file_base_name",
    "lm_head", "version", "hyb_act", "cache_block_outputs",
)  # fmt: skip
_KERNELS = ("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "backend")
ONLY = {"is_marlin_format": False, "pack_dtype": "int32", "dynamic": {}, "adapter": {}, "rotation": ""}


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """Protocol `quantized.base.Scheme`.

    Attributes:
        zero_offset: what to add to a stored zero.
    """

    bits: int
    group_size: int
    zero_offset: int

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        parts = Parts(module, found)
        if not parts.has("qweight"):
            return None
        num_out, num_in = shape
        group_size = resolve_group_size(self.group_size, module, num_in)
        num_groups, per_word = num_in // group_size, 32 // self.bits
        weight = parts.take("qweight", ("I32",), (num_in // per_word, num_out))
        zeros = parts.take("qzeros", ("I32",), (num_groups, num_out // per_word))
        scales = parts.take("scales", FLOATS, (num_groups, num_out))
        indexes = parts.take("g_idx", ("I32",), (num_in,)) if parts.has("g_idx") else None
        parts.drop_zero_bias()

        def order_of() -> npt.NDArray[np.int32] | None:
            return None if indexes is None else read_order(indexes.read(), group_size, module)

        def form() -> GroupedTensor:
            return form_row(num_in, self.bits, group_size, scales, "bfloat16", has_zeros=True, order=order_of())

        def assemble() -> GroupedTensor:
            order = order_of()
            codes = unpack_rows(np.ascontiguousarray(weight.read().T), self.bits)  # words hold consecutive inputs
            stored_zeros = unpack_rows(zeros.read(), self.bits).T + np.uint8(self.zero_offset)
            return GroupedTensor(
                codes=codes if order is None else codes[:, order],
                scales=np.ascontiguousarray(scales.read().T, np.float32),
                zeros=unless_symmetric(stored_zeros & np.uint8(2**self.bits - 1), self.bits),
                offsets=None,
                bits=self.bits,
                group_size=group_size,
                activations="bfloat16",
                order=order,
            )

        return StoredMatrix(shape, form, assemble)


def read_gptq(fields: ConfigFields) -> GPTQScheme:
    """Reads a config of method "gptq" (ModelError says what is supported)."""
    bits = fields.take("bits", int)
    if bits not in BITS:
        raise ModelError(f"GPTQ with {bits} bits is not supported; supported are: {', '.join(map(str, BITS))}", param="bits")
    stored = fields.take("checkpoint_format", str, fields.take("format", str, "gptq"))
    if stored not in _OFFSETS:
        raise ModelError(
            f"the GPTQ checkpoint format {stored!r} is not supported; supported are: {', '.join(_OFFSETS)}",
            param="checkpoint_format",
        )
    group_size = fields.take("group_size", int)
    for name in (*_RECORDS, *_KERNELS):
        fields.take_any(name)
    return GPTQScheme(bits, group_size, _OFFSETS[stored])
