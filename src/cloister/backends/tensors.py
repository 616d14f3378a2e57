"""Weights in few bits, as a checkpoint or a calibration hands them to a back end.

Both kinds hold one code per byte; a back end packs them as its kernels want them. `dequantize` is the reference that every
kernel is tested against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Activations: TypeAlias = Literal["bfloat16", "int8"]
"""What meets the codes in a product: the inputs in bfloat16 (W4A16), or rounded to int8 with one scale per token (W4A8).

Rounding a token's inputs x: `scale = max(|x|) / 127`, `q = round_half_to_even(x * (127 / max(|x|)))`, all in float32; a token
of zeros has scale 0 and codes 0.
"""


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """Affine codes with a scale for each group of consecutive inputs (GPTQ, AWQ, GGUF, plain int8 and int4).

    `weight[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) + offsets[n, g]` with `g = k // group_size`.

    Attributes:
        codes: [out, in] uint8, each below 2 ** bits.
        scales: [out, in / group_size] float32.
        zeros: [out, in / group_size] uint8, or None for 2 ** (bits - 1) everywhere.
        offsets: [out, in / group_size] float32, or None for none.
        bits: 4 or 8.
        group_size: inputs that share a scale, a multiple of 16; the number of inputs for one scale per output.
        activations: what meets the codes.
        order: [in] int32 or None. Column k of `codes` multiplies input order[k] (GPTQ's act-order).
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None
    offsets: npt.NDArray[np.float32] | None
    bits: int
    group_size: int
    activations: Activations
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the weight [out, in] in float32, columns in the order of the inputs."""
        num_out, num_in = self.shape
        codes = self.codes.reshape(num_out, -1, self.group_size).astype(np.float32)
        zeros = np.float32(2 ** (self.bits - 1)) if self.zeros is None else self.zeros[:, :, None].astype(np.float32)
        weight = (codes - zeros) * self.scales[:, :, None]
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
    """

    codes: npt.NDArray[np.uint8]
    channel_scales: npt.NDArray[np.float32]
    group_scales: npt.NDArray[np.uint8]
    zeros: npt.NDArray[np.uint8]
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def integers(self) -> npt.NDArray[np.int8]:
        """Returns the int8 level [out, in], -127 to 127."""
        codes = self.codes.reshape(self.codes.shape[0], -1, self.group_size).astype(np.int16)
        levels = (codes - self.zeros[:, :, None]) * self.group_scales[:, :, None].astype(np.int16)
        return levels.reshape(self.shape).astype(np.int8)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the weight [out, in] in float32."""
        return self.integers().astype(np.float32) * self.channel_scales[:, None]


QuantizedTensor: TypeAlias = GroupedTensor | ProgressiveTensor
Tensor: TypeAlias = npt.NDArray[Any] | GroupedTensor | ProgressiveTensor
"""What `Weights.read` returns: float32, float16 or ml_dtypes.bfloat16, or one of the quantised kinds."""


def dequantized(tensor: Tensor) -> npt.NDArray[Any]:
    """Returns the tensor as numbers: itself, or its reference dequantisation in float32."""
    return tensor.dequantize() if isinstance(tensor, GroupedTensor | ProgressiveTensor) else tensor


def take_rows(tensor: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Returns some outputs of a matrix, as views."""
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
    )


def activations_of(tensor: Tensor) -> Activations:
    """Returns what meets a matrix in a product; one that is not quantised meets inputs as they are."""
    if isinstance(tensor, ProgressiveTensor):
        return "int8"
    return tensor.activations if isinstance(tensor, GroupedTensor) else "bfloat16"


def stored_bits(tensor: GroupedTensor | ProgressiveTensor) -> float:
    """Returns the bits that a quantised tensor takes per weight once packed, scales and zero points included."""
    if isinstance(tensor, ProgressiveTensor):
        return 4 + 16 / tensor.group_size + 32 / tensor.shape[1]
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
