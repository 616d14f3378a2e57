"""AWQ checkpoints (AutoAWQ, version "gemm"): 4 bits, packed along outputs in an order of their own.

`qweight [in, out / 8]`, `qzeros [groups, out / 8]`, `scales [groups, out]`; the nibbles of a word, lowest first, hold its
outputs 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import GroupedTensor
from cloister.models.config import ConfigFields
from cloister.models.quantized.base import (
    Codes,
    Parts,
    Stored,
    StoredMatrix,
    form_row,
    resolve_group_size,
    unless_symmetric,
    unpack_rows,
)
from cloister.models.safetensors import FLOATS, TensorEntry
from cloister.types.errors import ModelError

_OUTPUTS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_PLACES = np.argsort(_OUTPUTS)  # the nibble that holds output 0, 1, ...
_KERNELS = (
    "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "modules_to_not_convert",
    "zero_point",  # the zeros are in the file, or are not
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AWQScheme:
    """Protocol `quantized.base.Scheme`."""

    group_size: int

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        parts = Parts(module, found)
        if not parts.has("qweight"):
            return None
        num_out, num_in = shape
        group_size = resolve_group_size(self.group_size, module, num_in)
        num_groups = num_in // group_size
        weight = parts.take("qweight", ("I32",), (num_in, num_out // 8))
        zeros = parts.take("qzeros", ("I32",), (num_groups, num_out // 8)) if parts.has("qzeros") else None
        scales = parts.take("scales", FLOATS, (num_groups, num_out))
        parts.drop_zero_bias()

        def form() -> GroupedTensor:
            return form_row(num_in, 4, group_size, scales, "bfloat16", has_zeros=zeros is not None)

        def assemble() -> GroupedTensor:
            return GroupedTensor(
                codes=np.ascontiguousarray(unpack_outputs(weight.read()).T),
                scales=np.ascontiguousarray(scales.read().T, np.float32),
                zeros=None if zeros is None else unless_symmetric(unpack_outputs(zeros.read()).T, 4),
                offsets=None,
                bits=4,
                group_size=group_size,
                activations="bfloat16",
            )

        return StoredMatrix(shape, form, assemble)


def unpack_outputs(words: npt.NDArray[Any]) -> Codes:
    """Returns codes [rows, out] of words [rows, out / 8]."""
    nibbles = unpack_rows(words, 4).reshape(len(words), -1, 8)
    return nibbles[:, :, _PLACES].reshape(len(words), -1)


def read_awq(fields: ConfigFields) -> AWQScheme:
    """Reads a config of method "awq" (ModelError says what is supported)."""
    bits = fields.take("bits", int, fields.take("w_bit", int, 4))
    if bits != 4:
        raise ModelError(f"AWQ with {bits} bits is not supported; supported is: 4", param="bits")
    version = fields.take("version", str, "gemm").lower()
    if version != "gemm":
        raise ModelError(f"the AWQ version {version!r} is not supported; supported is: gemm", param="version")
    for name in _KERNELS:
        fields.take_any(name)
    return AWQScheme(fields.take("group_size", int, fields.take("q_group_size", int, 128)))
