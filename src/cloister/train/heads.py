"""Heads as torch modules; what they save is what `runner.drafters` reads.

Both kinds begin as nothing: added to the hidden state they came from they change it by zero, so that every head starts as the
model's own guess of the next token (Cai et al. 2024, section 2.1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MedusaHeads(nn.Module):
    """Each head: `num_blocks` residual blocks x + D SiLU(U x + u), as wide inside as outside.

    Args:
        generator: draws U; D is zero.
    """

    def __init__(self, num_heads: int, hidden_size: int, num_blocks: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_heads, self.num_blocks = num_heads, num_blocks
        count = num_heads * num_blocks
        self.up = nn.ParameterList([_draw(hidden_size, hidden_size, generator) for _ in range(count)])
        self.up_bias = nn.ParameterList([torch.zeros(hidden_size) for _ in range(count)])
        self.down = nn.ParameterList([torch.zeros(hidden_size, hidden_size) for _ in range(count)])

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns [num_heads, num_rows, hidden] of hidden states [num_rows, hidden]."""
        kind = hidden.dtype
        states = []
        for head in range(self.num_heads):
            state = hidden
            for part in range(head, head + self.num_heads * self.num_blocks, self.num_heads):
                inner = F.silu(F.linear(state, self.up[part].to(kind), self.up_bias[part].to(kind)))
                state = state + F.linear(inner, self.down[part].to(kind))
            states.append(state)
        return torch.stack(states)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Returns what a file of heads holds, as bfloat16."""
        found = {}
        for block in range(self.num_blocks):
            some = slice(block * self.num_heads, (block + 1) * self.num_heads)
            for name, parts in (("up.weight", self.up), ("up.bias", self.up_bias), ("down.weight", self.down)):
                found[f"blocks.{block}.{name}"] = _round(torch.stack(list(parts[some])))
        return found


class BlockwiseHeads(nn.Module):
    """All heads together: x + D_k relu(U x + u) + d_k.

    Args:
        inner: rows of U.
        generator: draws U; D is zero.
    """

    def __init__(self, num_heads: int, hidden_size: int, inner: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(_draw(inner, hidden_size, generator))
        self.up_bias = nn.Parameter(torch.zeros(inner))
        self.down = nn.ParameterList([torch.zeros(hidden_size, inner) for _ in range(num_heads)])
        self.down_bias = nn.ParameterList([torch.zeros(hidden_size) for _ in range(num_heads)])

    def forward(self, hidden: Tensor) -> Tensor:
        """As `MedusaHeads.forward`."""
        kind = hidden.dtype
        inner = F.relu(F.linear(hidden, self.up.to(kind), self.up_bias.to(kind)))
        parts = zip(self.down, self.down_bias, strict=True)
        return torch.stack([hidden + F.linear(inner, down.to(kind), bias.to(kind)) for down, bias in parts])

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """As `MedusaHeads.tensors`."""
        return {
            "up.weight": _round(self.up),
            "up.bias": _round(self.up_bias),
            "down.weight": _round(torch.stack(list(self.down))),
            "down.bias": _round(torch.stack(list(self.down_bias))),
        }


HeadsModule = MedusaHeads | BlockwiseHeads


MAKERS: Final[Mapping[str, Callable[[int, int, int, torch.Generator], HeadsModule]]] = {
    "medusa": MedusaHeads,
    "blockwise": BlockwiseHeads,
}
"""By kind: number of heads, hidden size, blocks of a head or rows of the inner layer, what draws the weights."""


def _draw(num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    drawn = torch.empty(num_rows, num_columns)
    return nn.init.normal_(drawn, std=num_columns**-0.5, generator=generator)


def _round(weight: Tensor) -> npt.NDArray[Any]:
    return np.array(weight.detach().numpy()).astype(ml_dtypes.bfloat16)
