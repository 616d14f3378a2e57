"""Products with weights in 4 or 8 bits: W4A16, W8A16, W4A8, W8A8, and QoQ's W4A8 in two levels.

The codes themselves are multiplied, which is exact (bfloat16 holds every integer up to 256), and each group of inputs is
scaled once, after its sum:

    y[m, n] = sum over groups g of  scales[n, g] * (sum of x * codes - zeros[n, g] * sum of x) + offsets[n, g] * sum of x

Inputs in int8 are summed in int32 and scaled by their token's factor at the end. Where an output has one scale and no zero
(W8A8), all of K is summed in int32, which is exact in any order, and is scaled once.

Two 4-bit codes share a byte: those of inputs k and k + depth, so that each half of a byte multiplies a block of consecutive
inputs and nothing is interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.tensors import GroupedTensor, ProgressiveTensor
from cloister.backends.torch.linear import rotate_blocks
from cloister.backends.torch.triton import EXACT
from cloister.backends.torch.triton.elementwise import round_rows
from cloister.backends.torch.triton.matmul import TileConfig

_MOST_SUMMED: Final = (2**31 - 1) // (128 * 127)
"""Products of two numbers in int8 that a sum in int32 holds."""


@dataclass(frozen=True, slots=True)
class TritonMatrix:
    """Codes as the kernel reads them.

    Attributes:
        codes: uint8, [outputs, padded inputs] or, in 4 bits, [outputs, padded inputs / 2]; int8, less half of the codes' range,
            where K is summed whole.
        scales: [groups, outputs] float32, or uint8 for QoQ's second level.
        zeros: [groups, outputs] uint8, or None for half of the codes' range.
        offsets: [groups, outputs] float32 or None.
        channel_scales: [outputs] float32, QoQ's first level, or None.
        order: [inputs] int64 or None: which input each column multiplies.
        depth: inputs multiplied at once, all of one group.
        rounds_inputs: inputs are rounded to int8, with one scale for each token. Those that a format wants rounded with a scale
            for each group stay as they are, and lose nothing.
        rotation: blocks of that many inputs are rotated first (`backends.tensors.rotate_blocks`); 0 for none.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    channel_scales: Tensor | None
    order: Tensor | None
    bits: int
    group_size: int
    num_inputs: int
    depth: int
    rounds_inputs: bool
    rotation: int

    @property
    def num_outputs(self) -> int:
        return len(self.codes)

    @property
    def sums_whole(self) -> bool:
        """Whether all of K is summed in int32."""
        return self.codes.dtype == torch.int8

    @property
    def kind(self) -> tuple[object, ...]:
        """What the kernel is compiled for; matrices of one kind agree on their tiles."""
        parts = tuple(part is None for part in (self.zeros, self.offsets, self.channel_scales))
        return "quantized", self.bits, self.depth, self.num_inputs, self.rounds_inputs, self.sums_whole, parts

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.offsets, self.channel_scales, self.order)
        return sum(part.nbytes for part in parts if part is not None)


def pack(tensor: GroupedTensor | ProgressiveTensor, device: torch.device) -> TritonMatrix:
    """Packs a quantised weight for the kernel, on `device`."""
    return _pack_levels(tensor, device) if isinstance(tensor, ProgressiveTensor) else _pack_groups(tensor, device)


def _pack_groups(tensor: GroupedTensor, device: torch.device) -> TritonMatrix:
    depth = 64 if tensor.group_size == tensor.shape[1] else _depth(tensor.group_size)
    codes = _join_halves(tensor.codes, depth) if tensor.bits == 4 else _pad_inputs(tensor.codes, depth)
    if _sums_whole(tensor):
        codes = (codes ^ 128).view(np.int8)
    return TritonMatrix(
        codes=torch.from_numpy(codes).to(device),
        scales=_by_group(tensor.scales, device),
        zeros=None if tensor.zeros is None else _by_group(tensor.zeros, device),
        offsets=None if tensor.offsets is None else _by_group(tensor.offsets, device),
        channel_scales=None,
        order=None if tensor.order is None else torch.from_numpy(tensor.order.astype(np.int64)).to(device),
        bits=tensor.bits,
        group_size=tensor.group_size,
        num_inputs=tensor.shape[1],
        depth=depth,
        rounds_inputs=tensor.activations == "int8",
        rotation=tensor.rotation,
    )


def _pack_levels(tensor: ProgressiveTensor, device: torch.device) -> TritonMatrix:
    depth = _depth(tensor.group_size)
    return TritonMatrix(
        codes=torch.from_numpy(_join_halves(tensor.codes, depth)).to(device),
        scales=_by_group(tensor.group_scales, device),
        zeros=_by_group(tensor.zeros, device),
        offsets=None,
        channel_scales=torch.from_numpy(np.array(tensor.channel_scales)).to(device),
        order=None,
        bits=4,
        group_size=tensor.group_size,
        num_inputs=tensor.shape[1],
        depth=depth,
        rounds_inputs=True,
        rotation=tensor.rotation,
    )


def _sums_whole(tensor: GroupedTensor) -> bool:
    """Returns whether int32 holds the sum of codes and inputs in int8 over all of K, and one factor scales it."""
    is_plain = tensor.zeros is None and tensor.offsets is None and tensor.group_size == tensor.shape[1]
    return is_plain and tensor.bits == 8 and tensor.activations == "int8" and tensor.shape[1] <= _MOST_SUMMED


def _depth(group_size: int) -> int:
    """Returns how many inputs, all of one group, are multiplied at once."""
    return next(size for size in (64, 32, 16) if group_size % size == 0)


def _by_group(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values.T, order="C")).to(device)  # a copy: what was read from a file is not writable


def _join_halves(codes: np.ndarray, depth: int) -> np.ndarray:
    """Returns [outputs, padded inputs / 2]: byte j of block b holds the codes of inputs 2b * depth + j and depth more."""
    blocks = _pad_inputs(codes, 2 * depth).reshape(len(codes), -1, 2, depth)
    joined: np.ndarray = (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(len(codes), -1)
    return joined


def _pad_inputs(codes: np.ndarray, multiple: int) -> np.ndarray:
    """Returns codes with zeros behind them; the kernel multiplies those by inputs of zero."""
    num_outputs, num_inputs = codes.shape
    padded = np.zeros((num_outputs, -(-num_inputs // multiple) * multiple), np.uint8)
    padded[:, :num_inputs] = codes
    return padded


@triton.jit
def _add_block(
    sums, inputs, rows, has_row, columns, has_column, codes, start, scales, zeros, offsets, num_inputs, num_outputs, group_size,
    DEPTH: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, INT8: tl.constexpr,
    TWO_LEVELS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds the product of DEPTH inputs from `start` on, all of one group, with their codes [DEPTH, COLUMNS]."""
    depth = start + tl.arange(0, DEPTH)
    kept = has_row[:, None] & (depth < num_inputs)[None, :]
    left = tl.load(inputs + rows.to(tl.int64)[:, None] * num_inputs + depth[None, :], mask=kept, other=0)
    group = (start // group_size) * num_outputs + columns
    in_group = has_column & (start < num_inputs)
    if WHOLE:
        sums = tl.dot(left, codes, sums, out_dtype=tl.int32)
    elif TWO_LEVELS:
        zero = tl.load(zeros + group, mask=in_group, other=0).to(tl.int32)
        factor = tl.load(scales + group, mask=in_group, other=0).to(tl.int32)
        levels = (codes.to(tl.int32) - zero[None, :]) * factor[None, :]
        sums = tl.dot(left, levels.to(tl.int8), sums, out_dtype=tl.int32)
    else:
        if INT8 and DEPTH >= 32:
            product = tl.dot(left, (codes.to(tl.int16) - MIDDLE).to(tl.int8), out_dtype=tl.int32).to(tl.float32)
            total = tl.sum(left.to(tl.int32), 1).to(tl.float32)
        elif INT8:  # int8 products take 32 inputs at least; of 16 the sum in float32 is exact, too
            wide = left.to(tl.float32).to(tl.bfloat16)
            product = tl.dot(wide, (codes.to(tl.int16) - MIDDLE).to(tl.float32).to(tl.bfloat16))
            total = tl.sum(left.to(tl.int32), 1).to(tl.float32)
        else:
            ones = tl.full((DEPTH, 16), 1.0, tl.float32).to(left.dtype)
            # 2^23 + codes, from its bits: a conversion of a whole number takes several times as long as a sum
            levels = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)
            levels = levels.to(left.dtype)
            product = tl.dot(left, levels, input_precision="ieee")
            total = tl.max(tl.dot(left, ones, input_precision="ieee"), 1)  # equal columns: a product adds in one order
        if HAS_ZEROS:
            zero = tl.load(zeros + group, mask=in_group, other=MIDDLE).to(tl.float32)
            product += (MIDDLE - zero)[None, :] * total[:, None]
        sums += product * tl.load(scales + group, mask=in_group, other=0.0)[None, :]
        if HAS_OFFSETS:
            sums += tl.load(offsets + group, mask=in_group, other=0.0)[None, :] * total[:, None]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def grouped_kernel(
    inputs, token_scales, codes, scales, zeros, offsets, channel_scales, bias, out,
    num_rows, num_outputs, num_inputs, group_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, INT8: tl.constexpr, TWO_LEVELS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One program computes [ROWS, COLUMNS] of the product."""
    MIDDLE: tl.constexpr = 8 if BITS == 4 else 128
    BLOCK: tl.constexpr = 2 * DEPTH if BITS == 4 else DEPTH
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % num_row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < num_rows, columns < num_outputs
    num_blocks = tl.cdiv(num_inputs, BLOCK)
    lanes = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), tl.int32 if TWO_LEVELS or WHOLE else tl.float32)
    for block in range(num_blocks):
        start = block * BLOCK
        places = codes + columns.to(tl.int64)[None, :] * (num_blocks * DEPTH) + block * DEPTH + lanes[:, None]
        found = tl.load(places, mask=has_column[None, :], other=0)
        low = found & 15 if BITS == 4 else found
        sums = _add_block(
            sums, inputs, rows, has_row, columns, has_column, low, start, scales, zeros, offsets, num_inputs, num_outputs,
            group_size, DEPTH, MIDDLE, HAS_ZEROS, HAS_OFFSETS, INT8, TWO_LEVELS, WHOLE,
        )  # fmt: skip
        if BITS == 4:
            sums = _add_block(
                sums, inputs, rows, has_row, columns, has_column, found >> 4, start + DEPTH, scales, zeros, offsets, num_inputs,
                num_outputs, group_size, DEPTH, MIDDLE, HAS_ZEROS, HAS_OFFSETS, INT8, TWO_LEVELS, WHOLE,
            )  # fmt: skip
    result = sums.to(tl.float32)
    if WHOLE:
        result *= tl.load(scales + columns, mask=has_column, other=0.0)[None, :]
    if TWO_LEVELS:
        result *= tl.load(channel_scales + columns, mask=has_column, other=0.0)[None, :]
    if INT8:
        result *= tl.load(token_scales + rows, mask=has_row, other=0.0)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=has_column, other=0.0)[None, :]
    target = out + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def grouped_matmul(
    inputs: Tensor, matrix: TritonMatrix, bias: Tensor | None, out_dtype: torch.dtype, tile: TileConfig
) -> Tensor:
    """Returns inputs W^T + bias, [num_rows, outputs].

    Args:
        inputs: [num_rows, inputs] float32, float16 or bfloat16.
        bias: [outputs] float32 or None.
    """
    if matrix.order is not None:
        inputs = inputs.index_select(1, matrix.order)
    if matrix.rotation:
        inputs = rotate_blocks(inputs.float(), matrix.rotation)
    rows, token_scales = round_rows(inputs, torch.int8) if matrix.rounds_inputs else (inputs, inputs)
    num_rows, num_outputs = len(inputs), matrix.num_outputs
    out = inputs.new_empty(num_rows, num_outputs, dtype=out_dtype)
    scales = matrix.scales
    grouped_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.columns),)](
        rows, token_scales, matrix.codes, scales, _or(matrix.zeros, scales), _or(matrix.offsets, scales),
        _or(matrix.channel_scales, scales), _or(bias, scales), out, num_rows, num_outputs, matrix.num_inputs, matrix.group_size,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=matrix.depth, BITS=matrix.bits, HAS_ZEROS=matrix.zeros is not None,
        HAS_OFFSETS=matrix.offsets is not None, HAS_BIAS=bias is not None, INT8=matrix.rounds_inputs,
        TWO_LEVELS=matrix.channel_scales is not None, WHOLE=matrix.sums_whole,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **EXACT,
    )  # fmt: skip
    return out


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer that the kernel does not follow must still be one."""
    return stand_in if tensor is None else tensor
