"""FP8 checkpoints (Micikevicius et al. 2022): e4m3 with a scale per tensor, per output, or per block of 128 x 128.

No kernel of ours computes in FP8, so such a matrix is handed on in bfloat16, each product of value and scale rounded to float32
and then to bfloat16, some rows at a time: 2 bytes a weight while it is read, one matrix at a time.

Experts may lie in stacks `NAME [experts, in, out]` or `[experts, out, in]`, with scales in the order of the stack:
`NAME_scale_inv` for each block or expert (transformers, Qwen3-VL on the hub), `NAME_weight_scale` for all or each (ModelOpt),
`NAME_scale [experts, 1, out]` or `[experts, out, 1]` (FBGEMM, as transformers writes it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.models.config import ConfigFields
from cloister.models.quantized.base import Parts, StackedMatrices, StackPlace, Stored, StoredMatrix, cut_stack, take_part
from cloister.models.safetensors import FLOATS, TensorEntry
from cloister.types.errors import ModelError

E4M3 = ("F8_E4M3",)
_CHUNK = 1 << 18  # numbers at once: they stay in a core's own cache
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_STACK_SCALES = ("_scale_inv", "_weight_scale", "_scale")
_STACK_INPUTS = ("_input_scale", "_activation_scale")
_RECORDS = ("activation_scheme", "activation_scale_ub", "ignored_layers", "modules_to_not_convert", "scale_fmt", "dequantize")
"""Of how inputs would be rounded, which ours are not, and of modules that are plain, as the file shows."""


@dataclass(frozen=True, slots=True)
class FP8Scheme:
    """Protocol `quantized.base.StackScheme`.

    Attributes:
        block: (outputs, inputs) that share a scale, None where tensors or outputs have one.
    """

    block: tuple[int, int] | None = None

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        parts = Parts(module, found)
        return take_float8(parts, shape, self.block) if parts.dtype("weight") in E4M3 else None

    def take_stack(self, place: StackPlace, found: dict[str, TensorEntry]) -> StackedMatrices | None:
        is_coded = place.name in found and found[place.name].dtype in E4M3
        return take_float8_stack(place, found, self.block) if is_coded else None


def take_float8(parts: Parts, shape: tuple[int, int], block: tuple[int, int] | None) -> StoredMatrix:
    """Takes `weight` and `weight_scale` or `weight_scale_inv`; both names hold what to multiply by."""
    weight = parts.take("weight", E4M3, shape)
    name = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    shapes = ((), (1,), (shape[0],), (shape[0], 1)) if block is None else (_blocks(shape, block),)
    scale = parts.take(name, FLOATS, *shapes)
    parts.drop("input_scale", "input_scale_ub")
    return StoredMatrix(shape, lambda: None, lambda: multiply(weight.read(), scale.read(), block))


def take_float8_stack(place: StackPlace, found: dict[str, TensorEntry], block: tuple[int, int] | None) -> StackedMatrices:
    """Takes the matrices of all experts, and their scales under one of `_STACK_SCALES`."""
    (num_experts, num_out, num_in), name = place.shape, place.name
    codes, transposed = place.take(found, E4M3, num_in)
    scale_name = next((name + end for end in _STACK_SCALES if name + end in found), name + _STACK_SCALES[0])
    if block is None:
        shapes = (*place.one_number_each(), (num_experts, 1, num_out), (num_experts, num_out, 1))
    elif transposed and block[0] != block[1]:
        raise ModelError(f"{name} lies as [in, out], whose blocks of scales must be square", param="weight_block_size")
    else:
        shapes = (place.lay(*_blocks((num_out, num_in), block), transposed),)
    scale = take_part(found, scale_name, FLOATS, *shapes)
    for end in _STACK_INPUTS:
        found.pop(name + end, None)

    def read(expert: int, rows: slice) -> npt.NDArray[Any]:
        values = cut_stack(codes, expert, rows, transposed)
        if block is not None:
            its_rows = np.arange(num_out)[rows] // block[0]
            blocks = cut_stack(scale, expert, slice(None), transposed)[its_rows]
            return multiply(values, blocks, (1, block[1]))
        numbers = np.asarray(scale.read(), np.float32)
        numbers = numbers.reshape(num_experts if numbers.size > 1 else 1, -1)  # of all, of each expert, or of each output
        return multiply(values, np.broadcast_to(numbers, (num_experts, num_out))[expert, rows], None)

    return StackedMatrices(place.shape, lambda: None, read)


def multiply(codes: npt.NDArray[Any], scale: npt.NDArray[Any], block: tuple[int, int] | None) -> npt.NDArray[Any]:
    """Returns the matrix [out, in] that FP8 numbers and their scales stand for, in bfloat16."""
    weight = np.empty(codes.shape, ml_dtypes.bfloat16)
    scale = np.asarray(scale, np.float32)
    values = np.ascontiguousarray(codes).view(np.uint8)
    step = max(1, _CHUNK // codes.shape[1])
    for top in range(0, len(weight), step):
        rows = slice(top, min(top + step, len(weight)))
        weight[rows] = _VALUES[values[rows]] * spread(scale, rows, codes.shape, block)
    return weight


def spread(
    scale: npt.NDArray[np.float32], rows: slice, shape: tuple[int, ...], block: tuple[int, int] | None
) -> npt.NDArray[np.float32]:
    """Returns scales that broadcast over some rows of a matrix [out, in]."""
    if block is None:
        scale = scale.reshape(-1, 1)
        return scale if len(scale) == 1 else scale[rows]
    blocks: npt.NDArray[np.float32] = scale[np.arange(rows.start, rows.stop) // block[0]]
    return blocks.repeat(block[1], 1)[:, : shape[1]]


def read_fp8(fields: ConfigFields) -> FP8Scheme:
    """Reads a config of method "fp8" or "fbgemm_fp8" (ModelError says what is supported)."""
    kind = fields.take("fmt", str, "e4m3")
    if kind != "e4m3":
        raise ModelError(f"FP8 numbers of the kind {kind!r} are not supported; supported is: e4m3", param="fmt")
    for name in _RECORDS:
        fields.take_any(name)
    return FP8Scheme(read_block(fields.take_any("weight_block_size")))


def read_block(value: object) -> tuple[int, int] | None:
    """Returns a config's block of (outputs, inputs)."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ModelError("a block of scales must be two positive sizes", param="weight_block_size")
    return value[0], value[1]


def _blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
