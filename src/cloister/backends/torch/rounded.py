"""Products of inputs in int8: what W4A8 and W8A8 compute, as the reference of every integer kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from cloister.backends.torch.linear import Linear
from cloister.backends.torch.team import Team

_LARGEST = 127.0


class RoundedLinear:
    """y = round(x) W^T + b, with each row of x rounded to int8 (`backends.tensors.Activations`).

    The product is one of whole numbers with the dequantised weight, in float32, so that a row keeps its bits in any company.

    Args:
        weight: [outputs, inputs] float32, dequantised.
        bias: [outputs] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, team: Team) -> None:
        self._product = Linear(weight, None, team)
        self._bias = bias
        self.num_operations, self.tiles = self._product.num_operations, self._product.tiles

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [num_rows, outputs] for rows [num_rows, inputs], both float32; num_rows as `tiles.pad_rows` gives."""
        levels, scales = round_rows(rows)
        out = self._product(levels).mul_(scales)
        return out if self._bias is None else out.add_(self._bias)


class JoinedLinear:
    """Products of the same rows that are computed in different ways, side by side."""

    def __init__(self, parts: list[Linear | RoundedLinear]) -> None:
        self._parts = parts
        self.num_operations = sum(part.num_operations for part in parts)
        self.tiles = tuple(sorted(set(parts[0].tiles).intersection(*(part.tiles for part in parts))))

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the outputs of every part, one after another."""
        return torch.cat([part(rows) for part in self._parts], dim=1)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (int8 levels as float32 [num_rows, inputs], scales [num_rows, 1]); a row of zeros has scale 0."""
    peaks = rows.abs().amax(1, keepdim=True)
    inverse = torch.where(peaks > 0, _LARGEST / peaks, 0.0)
    return (rows * inverse).round_(), peaks / _LARGEST
