"""Products of inputs in int8: what W4A8 and W8A8 compute, as the reference of every integer kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from cloister.backends.tensors import InputRounding
from cloister.backends.torch.linear import Linear
from cloister.backends.torch.team import Team

_LARGEST = 127.0


class RoundedLinear:
    """y = round(x) W^T + b, with each row of x rounded to int8 (`backends.tensors.InputRounding`).

    Args:
        weight: [outputs, inputs] float32, dequantised, none of its inputs rotated.
        bias: [outputs] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, team: Team, rounding: InputRounding) -> None:
        self._product = Linear(rotate_blocks(weight, rounding.rotation), None, team)
        self._bias, self._rounding = bias, rounding
        self.num_operations, self.tiles = self._product.num_operations, self._product.tiles

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [num_rows, outputs] for rows [num_rows, inputs], both float32; num_rows as `tiles.pad_rows` gives."""
        levels, scales = round_rows(rotate_blocks(rows, self._rounding.rotation), self._rounding.group_size)
        if self._rounding.group_size:
            out = self._product(levels.mul_(scales).flatten(1))
        else:  # whole numbers are multiplied, so that as few sums as possible are rounded
            out = self._product(levels.flatten(1)).mul_(scales[:, 0])
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


def round_rows(rows: Tensor, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Returns int8 levels as float32 [num_rows, num_groups, group_size] and their scales [num_rows, num_groups, 1].

    Args:
        rows: [num_rows, inputs].
        group_size: inputs that share a scale; 0 for all of a row.
    """
    groups = rows.reshape(len(rows), -1, group_size or rows.shape[1])
    peaks = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peaks > 0, _LARGEST / peaks, 0.0)
    return (groups * inverse).round_(), peaks / _LARGEST


def rotate_blocks(rows: Tensor, size: int) -> Tensor:
    """Returns rows [num_rows, inputs] rotated, block by block (`backends.tensors.rotate_blocks`)."""
    if not size:
        return rows
    blocks, distance = rows.reshape(-1, size), 1
    while distance < size:
        first, second = blocks.view(-1, size // (2 * distance), 2, distance).unbind(2)
        blocks = torch.stack([first + second, first - second], 2).view(-1, size)
        distance *= 2
    rotated: Tensor = blocks * size**-0.5
    return rotated.view(rows.shape)
