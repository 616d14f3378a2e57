"""Heads that guess the tokens behind the next one from a hidden state, as back ends compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """One residual block of every head: x + D f(U x + u) + d.

    Attributes:
        up: [num_heads, inner, hidden], or [1, inner, hidden] where all heads share it. up_bias: [num_heads or 1, inner].
        down: [num_heads, hidden, inner].
        down_bias: [num_heads, hidden], or None.
    """

    up: FloatArray
    up_bias: FloatArray
    down: FloatArray
    down_bias: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """Heads whose outputs the model's own head reads (Medusa, Cai et al. 2024, section 2.1.1; blockwise, Stern et al. 2018).

    Attributes:
        blocks: one after the other, at least one; their first dimension is the head.
        activation: f of every block.
    """

    blocks: tuple[HeadBlock, ...]
    activation: Literal["silu", "relu"]

    @property
    def num_heads(self) -> int:
        return len(self.blocks[0].down)

    @property
    def num_bytes(self) -> int:
        parts = [part for block in self.blocks for part in (block.up, block.up_bias, block.down, block.down_bias)]
        return sum(part.nbytes for part in parts if part is not None)
