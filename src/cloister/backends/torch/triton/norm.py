"""Root mean square norm of the residual stream, with the addition that comes before it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT


@triton.jit
def norm_kernel(hidden, added, weight, out, eps, WIDTH: tl.constexpr, LANES: tl.constexpr, HAS_ADDED: tl.constexpr):
    """One program takes one row; it sums in an order that the width alone decides."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    values = tl.load(hidden + row + lanes, mask=inside, other=0.0)
    if HAS_ADDED:
        values += tl.load(added + row + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row + lanes, values, mask=inside)
    root = tl.sqrt(tl.sum(values * values) / WIDTH + eps)
    normed = values / root * tl.load(weight + lanes, mask=inside, other=0.0)
    tl.store(out + row + lanes, normed.to(out.dtype.element_ty), mask=inside)


def add_and_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Adds `added` to the residual stream in place and writes its norm (Zhang and Sennrich 2019).

    Args:
        hidden: [num_rows, width] float32.
        added: the same shape, any type, or None.
        weight: [width] float32.
        out: the same shape, any type.
    """
    num_rows, width = hidden.shape
    lanes = triton.next_power_of_2(width)
    norm_kernel[(num_rows,)](
        hidden, hidden if added is None else added, weight, out, eps,
        WIDTH=width, LANES=lanes, HAS_ADDED=added is not None, num_warps=min(16, max(1, lanes // 512)), **EXACT,
    )  # fmt: skip
