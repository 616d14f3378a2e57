"""Products in FP8 (e4m3): one scale for each output, one for each token, sums in float32.

Measured and tested; no program multiplies by it yet: FP8 checkpoints become bfloat16 (`models.quantized.fp8`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT
from cloister.backends.torch.triton.elementwise import round_rows
from cloister.backends.torch.triton.matmul import TileConfig


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """A weight in FP8.

    Attributes:
        codes: [outputs, inputs] float8_e4m3fn.
        scales: [outputs] float32; weight[n, k] = scales[n] * codes[n, k].
    """

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def pack_float8(weight: Tensor) -> Float8Matrix:
    """Rounds a weight [outputs, inputs] to e4m3, its largest number of each output to 448."""
    return Float8Matrix(*round_rows(weight, torch.float8_e4m3fn))


@triton.jit(do_not_specialize=["num_rows"])
def float8_kernel(
    inputs, token_scales, codes, scales, bias, out, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program computes [ROWS, COLUMNS] of the product."""
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % num_row_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < num_rows, columns < num_outputs
    sources = inputs + rows.to(tl.int64)[:, None] * num_inputs
    factors = codes + columns.to(tl.int64)[None, :] * num_inputs
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        in_depth = depth < num_inputs
        left = tl.load(sources + depth[None, :], mask=has_row[:, None] & in_depth[None, :], other=0.0)
        right = tl.load(factors + depth[:, None], mask=in_depth[:, None] & has_column[None, :], other=0.0)
        sums = tl.dot(left, right, sums)
    result = sums * tl.load(scales + columns, mask=has_column, other=0.0)[None, :]
    result *= tl.load(token_scales + rows, mask=has_row, other=0.0)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=has_column, other=0.0)[None, :]
    places = out + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def float8_matmul(
    inputs: Tensor, matrix: Float8Matrix, bias: Tensor | None, out_dtype: torch.dtype, tile: TileConfig
) -> Tensor:
    """Returns inputs W^T + bias, [num_rows, outputs], for inputs [num_rows, inputs] rounded to e4m3 token by token."""
    rows, token_scales = round_rows(inputs, torch.float8_e4m3fn)
    num_rows, num_inputs = inputs.shape
    num_outputs = len(matrix.codes)
    out = inputs.new_empty(num_rows, num_outputs, dtype=out_dtype)
    float8_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_outputs, tile.columns),)](
        rows, token_scales, matrix.codes, matrix.scales, out if bias is None else bias, out, num_rows, num_outputs, num_inputs,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=64, HAS_BIAS=bias is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **EXACT,
    )  # fmt: skip
    return out
