"""Matrix products whose rows have the same bits in any company: K is summed in one order, 64 inputs at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT


@dataclass(frozen=True, slots=True)
class TileConfig:
    """What one program of a product computes. Only `rows` and `columns` differ among the tiles that a program may use."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows"])
def matmul_kernel(
    inputs, weight, bias, out, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program computes [ROWS, COLUMNS] of the product; programs that share columns of the weight run side by side."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % num_row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < num_rows, columns < num_outputs
    sources = inputs + rows.to(tl.int64)[:, None] * num_inputs
    factors = weight + columns.to(tl.int64)[None, :] * num_inputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        in_depth = depth < num_inputs
        left = tl.load(sources + depth[None, :], mask=has_row[:, None] & in_depth[None, :], other=0.0)
        right = tl.load(factors + depth[:, None], mask=in_depth[:, None] & has_column[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=has_column, other=0.0)[None, :]
    places = out + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def matmul(inputs: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tile: TileConfig) -> Tensor:
    """Returns inputs W^T + bias, [num_rows, outputs].

    Args:
        inputs: [num_rows, inputs] of the weight's type.
        weight: [outputs, inputs] float32, float16 or bfloat16.
        bias: [outputs] float32 or None.
    """
    num_rows, num_inputs = inputs.shape
    out = inputs.new_empty(num_rows, len(weight), dtype=out_dtype)
    matmul_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(len(weight), tile.columns),)](
        inputs, weight, out if bias is None else bias, out, num_rows, len(weight), num_inputs,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=64 if weight.itemsize == 2 else 32, HAS_BIAS=bias is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **EXACT,
    )  # fmt: skip
    return out
