"""How many rows a matrix product may have at once so that each row's bits never change (rule 6).

A product of 32 rows is the reference. Libraries pick other kernels for other row counts, and some of them sum in another
order: torch's float32 product of one row differs from that of two. So every product runs on tiles of a fixed number of
rows, and a size other than 32 is used only where it was measured, when the program is built, to give the bits of 32.
A kernel that sums in another order is found out at once by random numbers: of thousands of sums, some round otherwise.

A row's bits may depend on its place in a tile, too: with fewer than 12 columns MKL's AVX2 kernels add up some rows of a tile in
another order than others. So products have `FEWEST_COLUMNS` or more, the surplus ones zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REFERENCE_ROWS = 32
CANDIDATES = (4, 8, 16, 32, 64, 128, 256)
FEWEST_COLUMNS = 16
_FEWEST_ROWS = 8  # so that whole vectors hold the rows of any elementwise step (`layers`)

Product = Callable[[Tensor], Tensor]


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
