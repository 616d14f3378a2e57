"""FP8 checkpoints (Micikevicius et al. 2022): e4m3 with a scale per tensor, per output, or per block of 128 x 128.

No kernel of ours computes in FP8, so such a matrix is handed on in float32, each product of value and scale rounded once. That
takes 4 bytes a weight while it is read, one matrix at a time; what stays is what the back end makes of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.models.config import ConfigFields
from cloister.models.quantized.base import Matrix, Parts, Stored
from cloister.models.safetensors import FLOATS, TensorEntry
from cloister.types.errors import ModelError

E4M3 = ("F8_E4M3",)
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


def take_float8(parts: Parts, shape: tuple[int, int], block: tuple[int, int] | None) -> Matrix:
    """Takes `weight` and `weight_scale` or `weight_scale_inv`; both names hold what to multiply by."""
    weight = parts.take("weight", E4M3, shape)
    name = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    shapes = ((), (1,), (shape[0],), (shape[0], 1)) if block is None else (_blocks(shape, block),)
    scale = parts.take(name, FLOATS, *shapes)
    parts.drop("input_scale", "input_scale_ub")
    return Matrix(shape, None, lambda: weight.read().astype(np.float32) * spread(scale.read(), shape, block))


def spread(scale: npt.NDArray[Any], shape: tuple[int, int], block: tuple[int, int] | None) -> npt.NDArray[np.float32]:
    """Returns scales that broadcast over a matrix [out, in]."""
    scale = np.asarray(scale, np.float32)
    if block is None:
        return scale.reshape(-1, 1)
    return scale.repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)[:, : shape[1]]


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
