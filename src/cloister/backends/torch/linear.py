"""Matrix products whose rows have the same bits in any batch (batch invariance): fixed tiles of rows, fixed panels of columns.

A product of 32 rows is the reference. Libraries pick other kernels for other row counts, and some of them sum in another
order: torch's float32 product of one row differs from that of two. So every product runs on tiles of a fixed number of
rows, and a size other than 32 is used only where it was measured, when the program is built, to give the bits of 32.
A kernel that sums in another order is found out at once by random numbers: of thousands of sums, some round otherwise.

A row's bits may depend on its place in a tile, too: with fewer than 12 columns MKL's AVX2 kernels add up some rows of a tile in
another order than others. So products have `FEWEST_COLUMNS` or more, the surplus ones zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from cloister.backends.tensors import InputRounding
from cloister.backends.torch.schedule import Team

REFERENCE_ROWS = 32
CANDIDATES = (4, 8, 16, 32, 64, 128, 256)
FEWEST_COLUMNS = 16
_FEWEST_ROWS = 8  # so that whole vectors hold the rows of any elementwise step (`layers`)

Product = Callable[[Tensor], Tensor]
_PANEL = 1024  # columns in a panel; what one thread takes of a wide layer


def measure_tiles(product: Product, num_inputs: int, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Returns the sizes among `CANDIDATES` that agree bit by bit with the reference, ascending.

    Args:
        product: multiplies rows [num_rows, num_inputs] by a fixed matrix of random numbers.
    """
    generator = torch.Generator().manual_seed(num_inputs)
    rows = torch.randn(max(CANDIDATES), num_inputs, generator=generator).to(device, dtype)
    reference = _in_tiles(product, rows, REFERENCE_ROWS)
    return tuple(
        size for size in CANDIDATES if size == REFERENCE_ROWS or torch.equal(_in_tiles(product, rows, size), reference)
    )


def pad_rows(num_rows: int, tiles: Sequence[int]) -> int:
    """Returns how many rows to compute for `num_rows`: one tile if one is enough, else a multiple of the reference."""
    for size in tiles:
        if max(num_rows, _FEWEST_ROWS) <= size <= REFERENCE_ROWS:
            return size
    return -(-num_rows // REFERENCE_ROWS) * REFERENCE_ROWS


def cut_rows(num_rows: int, tiles: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts rows (padded by `pad_rows`) into (start, end) tiles, the largest first."""
    cuts, start = [], 0
    while start < num_rows:
        size = max(size for size in tiles if size <= num_rows - start)
        cuts.append((start, start + size))
        start += size
    return cuts


def _in_tiles(product: Product, rows: Tensor, size: int) -> Tensor:
    return torch.cat([product(rows[start : start + size]) for start in range(0, len(rows), size)])


class Linear:
    """y = x W^T + b, with W kept transposed ([inputs, outputs], twice as quick for few rows) and cut into panels.

    Args:
        weight: [outputs, inputs].
        bias: [outputs] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, team: Team) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        weight = torch.nn.functional.pad(weight, (0, 0, 0, max(0, FEWEST_COLUMNS - self.num_outputs)))
        self.num_operations = 2.0 * self.num_outputs * self.num_inputs
        self.bias = bias
        self._team = team
        self._columns = cut_columns(len(weight))
        self._panels = [weight[start:end].t().contiguous() for start, end in self._columns]
        self.tiles = common_tiles(*(panel_tiles(self.num_inputs, p.shape[1], p.dtype, p.device) for p in self._panels))

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [num_rows, outputs] for rows [num_rows, inputs], both float32; num_rows as `pad_rows` gives.

        The product itself is computed in the weight's own type.
        """
        rows = rows.to(self._panels[0].dtype)
        out = rows.new_empty(rows.shape[0], self._columns[-1][1])
        tasks = [
            partial(torch.mm, rows[top:bottom], panel, out=out[top:bottom, left:right])
            for top, bottom in cut_rows(rows.shape[0], self.tiles)
            for (left, right), panel in zip(self._columns, self._panels, strict=True)
        ]
        self._team.run(tasks, rows.shape[0] * self.num_operations)
        out = out[:, : self.num_outputs]
        if self.bias is not None:
            out.add_(self.bias)
        return out.float()


def cut_columns(num_outputs: int) -> list[tuple[int, int]]:
    """Cuts columns into (start, end) panels, by their number alone."""
    if num_outputs <= 3 * _PANEL // 2:
        return [(0, num_outputs)]
    return [(start, min(start + _PANEL, num_outputs)) for start in range(0, num_outputs, _PANEL)]


def common_tiles(*tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tile sizes that are in every tuple."""
    return tuple(sorted(set(tiles[0]).intersection(*tiles[1:])))


@cache
def panel_tiles(num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Returns the tile sizes that agree for products of this shape, on this machine."""
    generator = torch.Generator().manual_seed(num_outputs)
    panel = torch.randn(num_inputs, num_outputs, generator=generator).to(device, dtype)
    wide = panel.new_empty(256, 2 * num_outputs)  # outputs are panels of a wider matrix, here too

    def multiply(rows: Tensor) -> Tensor:
        return torch.mm(rows, panel, out=wide[: rows.shape[0], :num_outputs]).clone()

    return measure_tiles(multiply, num_inputs, dtype, device)


# Matrix products with int8 activations (W4A8, W8A8): the reference of every integer kernel.


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
        """Returns [num_rows, outputs] for rows [num_rows, inputs], both float32; num_rows as `pad_rows` gives."""
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
