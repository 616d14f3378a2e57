"""FP8 checkpoints (Micikevicius et al. 2022): e4m3 with a scale per tensor, per output, or per block of 128 x 128.

No kernel of ours computes in FP8, so such a matrix is handed on in bfloat16, each product of value and scale rounded to float32
and then to bfloat16, some rows at a time: 2 bytes a weight while it is read, one matrix at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.models.config import ConfigFields
from cloister.models.quantized.base import Parts, Stored, StoredMatrix
from cloister.models.safetensors import FLOATS, TensorEntry
from cloister.types.errors import ModelError

E4M3 = ("F8_E4M3",)
_CHUNK = 1 << 18  # numbers at once: they stay in a core's own cache
_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_RECORDS = ("activation_scheme", "activation_scale_ub", "ignored_layers", "modules_to_not_convert", "scale_fmt", "dequantize")
"""Of how inputs would be rounded, which ours are not, and of modules that are plain, as the file shows."""


@dataclass(frozen=True, slots=True)
class FP8Scheme:
    """Protocol `quantized.base.Scheme`.

    Attributes:
        block: (outputs, inputs) that share a scale, None where tensors or outputs have one.
    """

    block: tuple[int, int] | None = None

    def take(self, module: str, shape: tuple[int, int], found: dict[str, TensorEntry]) -> Stored | None:
        parts = Parts(module, found)
        return take_float8(parts, shape, self.block) if parts.dtype("weight") in E4M3 else None


def take_float8(parts: Parts, shape: tuple[int, int], block: tuple[int, int] | None) -> StoredMatrix:
    """Takes `weight` and `weight_scale` or `weight_scale_inv`; both names hold what to multiply by."""
    weight = parts.take("weight", E4M3, shape)
    name = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    shapes = ((), (1,), (shape[0],), (shape[0], 1)) if block is None else (_blocks(shape, block),)
    scale = parts.take(name, FLOATS, *shapes)
    parts.drop("input_scale", "input_scale_ub")
    return StoredMatrix(shape, lambda: None, lambda: multiply(weight.read(), scale.read(), block))


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
