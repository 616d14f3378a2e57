"""Weights in few bits, as a checkpoint or a calibration hands them to a back end.

Both kinds hold one code per byte; a back end packs them as its kernels want them. `dequantize` is the reference that every
kernel is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Activations: TypeAlias = Literal["bfloat16", "int8", "int8_group"]
"""What meets the codes in a product: the inputs in bfloat16 (W4A16), or rounded to int8 (W4A8, W8A8) with one scale for each
token, or one for each token and group of the weights.

Rounding inputs x that share a scale: `scale = max(|x|) / 127`, `q = round_half_to_even(x * (127 / max(|x|)))`, all in float32;
where all are zero the scale is 0 and so are the codes.
"""
E2M1_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16).astype(np.uint8) + np.uint8(128)
"""[16] uint8: 128 and twice each E2M1 number, by its bits (OCP Microscaling Formats 1.0, section 5.3.3)."""
E2M1_BITS = np.zeros(256, np.uint8)
"""[256] uint8: the bits of a code of `E2M1_CODES`; minus zero is zero."""
E2M1_BITS[E2M1_CODES[::-1]] = np.arange(16, dtype=np.uint8)[::-1]
ROTATIONS = (128, 64, 16)
"""Blocks that inputs of products are rotated in."""
_NUMBERS_AT_ONCE = 1 << 16  # so that they stay in a core's own cache


@dataclass(frozen=True, slots=True)
class InputRounding:
    """How the inputs of a product are rounded to int8 (`Activations`).

    Attributes:
        group_size: inputs that share a scale; 0 for all of a token's.
        rotation: blocks of that many inputs are rotated first (`rotate_blocks`), as the matrix is that they meet; 0 for none.
    """

    group_size: int = 0
    rotation: int = 0


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """Affine codes with a scale for each group of consecutive inputs (GPTQ, AWQ, GGUF, plain int8 and int4).

    `weight[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) + offsets[n, g]` with `g = k // group_size`; with scales for
    outputs too, `(scales[n, g] * output_scales[n]) * (codes[n, k] - zeros[n, g])`, both products rounded to float32.

    Attributes:
        codes: [out, in] uint8, each below 2 ** bits.
        scales: [out, in / group_size] float32.
        zeros: [out, in / group_size] uint8, or None for 2 ** (bits - 1) everywhere.
        offsets: [out, in / group_size] float32, or None for none.
        bits: 4 or 8.
        group_size: inputs that share a scale, a multiple of 16; the number of inputs for one scale per output.
        activations: what meets the codes.
        order: [in] int32 or None. Column k of `codes` multiplies input order[k] (GPTQ's act-order).
        rotation: the formula gives the weight with its blocks of that many inputs rotated (`rotate_blocks`); 0 for as it is.
        is_mxfp4: every code is one of `E2M1_CODES` and every scale a power of two, so that 4 bits hold a code and 8 a scale.
            `bits` is 8 all the same, and there are neither zeros nor offsets.
        output_scales: [out] float32 or None; only where `is_nvfp4`.
        is_nvfp4: every code is one of `E2M1_CODES` and every scale half a number of E4M3, of 16 inputs; the rest as `is_mxfp4`.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None
    offsets: npt.NDArray[np.float32] | None
    bits: int
    group_size: int
    activations: Activations
    order: npt.NDArray[np.int32] | None = None
    rotation: int = 0
    is_mxfp4: bool = False
    output_scales: npt.NDArray[np.float32] | None = None
    is_nvfp4: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_e2m1(self) -> bool:
        """Whether codes are floats of 4 bits."""
        return self.is_mxfp4 or self.is_nvfp4

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the weight [out, in] in float32, columns in the order of the inputs, none of them rotated."""
        return rotate_blocks(self.dequantize_rotated(), self.rotation)

    def dequantize_rotated(self) -> npt.NDArray[np.float32]:
        """Returns what rotated inputs are multiplied by: as `dequantize`, blocks of `rotation` inputs still rotated."""
        num_out, num_in = self.shape
        codes = self.codes.reshape(num_out, -1, self.group_size).astype(np.float32)
        zeros = np.float32(2 ** (self.bits - 1)) if self.zeros is None else self.zeros[:, :, None].astype(np.float32)
        scales = self.scales if self.output_scales is None else self.scales * self.output_scales[:, None]
        weight = (codes - zeros) * scales[:, :, None]
        if self.offsets is not None:
            weight += self.offsets[:, :, None]
        return _in_order(weight.reshape(num_out, num_in), self.order)


@dataclass(frozen=True, slots=True)
class ProgressiveTensor:
    """QoQ's two levels (Lin et al. 2024, section 4.1): int8 with one scale per output, and 4-bit codes of that int8 by group.

    `weight[n, k] = channel_scales[n] * group_scales[n, g] * (codes[n, k] - zeros[n, g])`; the integer factor lies in
    [-127, 127] (the protective range), so that products stay in int8 arithmetic over all inputs. Activations are int8.

    Attributes:
        codes: [out, in] uint8, 0 to 15.
        channel_scales: [out] float32.
        group_scales: [out, in / group_size] uint8, 1 to 16.
        zeros: [out, in / group_size] uint8, 0 to 15.
        group_size: a multiple of 32.
        rotation: as `GroupedTensor` has it.
    """

    codes: npt.NDArray[np.uint8]
    channel_scales: npt.NDArray[np.float32]
    group_scales: npt.NDArray[np.uint8]
    zeros: npt.NDArray[np.uint8]
    group_size: int
    rotation: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def integers(self) -> npt.NDArray[np.int8]:
        """Returns the int8 level [out, in], -127 to 127."""
        codes = self.codes.reshape(self.codes.shape[0], -1, self.group_size).astype(np.int16)
        levels = (codes - self.zeros[:, :, None]) * self.group_scales[:, :, None].astype(np.int16)
        return levels.reshape(self.shape).astype(np.int8)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the weight [out, in] in float32, none of its inputs rotated."""
        return rotate_blocks(self.dequantize_rotated(), self.rotation)

    def dequantize_rotated(self) -> npt.NDArray[np.float32]:
        """As `GroupedTensor` has it."""
        return self.integers().astype(np.float32) * self.channel_scales[:, None]


QuantizedTensor: TypeAlias = GroupedTensor | ProgressiveTensor
Tensor: TypeAlias = npt.NDArray[Any] | GroupedTensor | ProgressiveTensor
"""What `Weights.read` returns: float32, float16 or ml_dtypes.bfloat16, or one of the quantised kinds."""


def dequantized(tensor: Tensor) -> npt.NDArray[Any]:
    """Returns the tensor as numbers: itself, or its reference dequantisation in float32."""
    return tensor.dequantize() if isinstance(tensor, GroupedTensor | ProgressiveTensor) else tensor


def take_rows(tensor: QuantizedTensor, rows: slice | npt.NDArray[np.int32]) -> QuantizedTensor:
    """Returns some outputs of a matrix, those of a slice as views."""
    if isinstance(tensor, ProgressiveTensor):
        return replace(
            tensor,
            codes=tensor.codes[rows],
            channel_scales=tensor.channel_scales[rows],
            group_scales=tensor.group_scales[rows],
            zeros=tensor.zeros[rows],
        )
    return replace(
        tensor,
        codes=tensor.codes[rows],
        scales=tensor.scales[rows],
        zeros=None if tensor.zeros is None else tensor.zeros[rows],
        offsets=None if tensor.offsets is None else tensor.offsets[rows],
        output_scales=None if tensor.output_scales is None else tensor.output_scales[rows],
    )


def activations_of(tensor: Tensor) -> Activations:
    """Returns what meets a matrix in a product; one that is not quantised meets inputs as they are."""
    if isinstance(tensor, ProgressiveTensor):
        return "int8"
    return tensor.activations if isinstance(tensor, GroupedTensor) else "bfloat16"


def rounding_of(tensor: Tensor) -> InputRounding | None:
    """Returns how the inputs that meet a matrix are rounded; None where they are not."""
    if not isinstance(tensor, GroupedTensor | ProgressiveTensor) or activations_of(tensor) == "bfloat16":
        return None
    return InputRounding(tensor.group_size if activations_of(tensor) == "int8_group" else 0, tensor.rotation)


def choose_rotation(num_inputs: int) -> int:
    """Returns the largest block that a matrix's inputs can be rotated in, 0 where there is none."""
    return next((size for size in ROTATIONS if num_inputs % size == 0), 0)


def rotate_blocks(rows: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Returns rows [..., in] float32 whose blocks of `size` inputs are multiplied by a Hadamard matrix over its root.

    The rotation is its own inverse and keeps products of rotated rows with rotated weights as they were. An input that stands
    out is spread over its block, so that rounding leaves the others their digits (QuaRot, Ashkboos et al. 2024, section 3).
    Sums and differences are taken over distances 1, 2, 4 and so on, then comes the factor: kernels keep that order.

    Args:
        size: a power of 2 that divides `in`; 0 changes nothing.
    """
    if not size:
        return rows
    blocks, at_once = rows.reshape(-1, size), _NUMBERS_AT_ONCE // size
    rotated = np.empty(blocks.shape, np.float32)
    for start in range(0, len(blocks), at_once):
        part = slice(start, start + at_once)
        columns, distance = np.ascontiguousarray(blocks[part].T), 1  # an input of many blocks side by side: long vectors
        while distance < size:
            pairs = columns.reshape(size // (2 * distance), 2, distance, -1)
            sums = np.empty_like(pairs)
            np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
            columns = sums.reshape(size, -1)
            distance *= 2
        np.multiply(columns.T, np.float32(size**-0.5), out=rotated[part])
    return rotated.reshape(rows.shape)


def round_inputs(rows: npt.NDArray[np.float32], rounding: InputRounding) -> npt.NDArray[np.float32]:
    """Returns inputs [num_rows, in], rotated, as their codes give them back: the reference of what kernels multiply.

    They meet `dequantize_rotated`.
    """
    groups = rotate_blocks(rows, rounding.rotation).reshape(len(rows), -1, rounding.group_size or rows.shape[1])
    peaks = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks != 0)
    rounded: npt.NDArray[np.float32] = groups * inverse
    np.rint(rounded, out=rounded)
    rounded *= peaks / np.float32(127)
    return rounded.reshape(rows.shape)


def stored_bits(tensor: GroupedTensor | ProgressiveTensor) -> float:
    """Returns the bits that a quantised tensor takes per weight once packed, scales and zero points included."""
    if isinstance(tensor, ProgressiveTensor):
        return 4 + 16 / tensor.group_size + 32 / tensor.shape[1]
    if tensor.is_e2m1:
        return 4 + 8 / tensor.group_size + 32 * tensor.is_nvfp4 / tensor.shape[1]
    whole_row = tensor.group_size == tensor.shape[1]
    halves = np.array_equal(tensor.scales.astype(np.float16).astype(np.float32), tensor.scales)
    per_group = 16 if halves and not whole_row else 32
    return tensor.bits + (per_group + 8 * (tensor.zeros is not None) + 32 * (tensor.offsets is not None)) / tensor.group_size


def _in_order(weight: npt.NDArray[np.float32], order: npt.NDArray[np.int32] | None) -> npt.NDArray[np.float32]:
    if order is None:
        return weight
    sorted_weight = np.empty_like(weight)
    sorted_weight[:, order] = weight
    return sorted_weight
