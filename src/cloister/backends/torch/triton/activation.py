"""The gate of a feed-forward: act(gate) * up."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from cloister.backends.torch.triton import EXACT

_LANES: Final = 1024


@triton.jit
def gate_kernel(gate_up, out, WIDTH: tl.constexpr, LANES: tl.constexpr, ACTIVATION: tl.constexpr):
    FAR: tl.constexpr = 80.0  # where a gate is as good as shut, and exp is still finite
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lanes, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(tl.minimum(-gate, FAR)))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # x * (1 + tanh(y)) / 2 is x / (1 + exp(-2y))
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(tl.minimum(-bent, FAR)))
    tl.store(out + row * WIDTH + lanes, (active * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, out: Tensor, activation: str) -> None:
    """Writes act(gate) * up.

    Args:
        gate_up: [num_rows, 2 * width], gate before up.
        out: [num_rows, width].
        activation: as in `backends.spec.MlpSpec`.
    """
    num_rows, width = out.shape
    gate_kernel[(num_rows, triton.cdiv(width, _LANES))](
        gate_up, out, WIDTH=width, LANES=_LANES, ACTIVATION=activation, num_warps=4, **EXACT
    )
