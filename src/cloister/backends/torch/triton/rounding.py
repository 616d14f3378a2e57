"""Rounds activations to int8 or FP8, with one scale for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def round_kernel(
    inputs, rounded, scales, WIDTH: tl.constexpr, LANES: tl.constexpr, LARGEST: tl.constexpr, TO_INT: tl.constexpr
):
    """One program rounds one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    values = tl.load(inputs + row * WIDTH + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(values))
    factor = tl.where(peak > 0, tl.div_rn(LARGEST + tl.zeros_like(peak), tl.where(peak > 0, peak, 1.0)), 0.0)
    scaled = values * factor
    if TO_INT:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is below one is rounded away, half to even
    tl.store(rounded + row * WIDTH + lanes, scaled.to(rounded.dtype.element_ty), mask=lanes < WIDTH)
    tl.store(scales + row, tl.div_rn(peak, LARGEST + tl.zeros_like(peak)))


def round_rows(inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the rows in `dtype` (int8 or float8_e4m3fn) and their scales, [num_rows] float32.

    `backends.tensors.Activations` says how int8 is rounded; e4m3 is rounded likewise, with 448 as the largest code.
    """
    num_rows, width = inputs.shape
    rounded = inputs.new_empty(num_rows, width, dtype=dtype)
    scales = inputs.new_empty(num_rows, dtype=torch.float32)
    lanes = triton.next_power_of_2(width)
    round_kernel[(num_rows,)](
        inputs, rounded, scales, WIDTH=width, LANES=lanes, LARGEST=_LARGEST[dtype], TO_INT=dtype == torch.int8,
        num_warps=min(16, max(1, lanes // 512)), **EXACT,
    )  # fmt: skip
    return rounded, scales
