"""Which tiles a product may use so that each row's bits never change, measured when a program is built (batch invariance).

Every tile sums K in the same order, but a device has several instructions for a block of a product (a tensor core of Hopper
takes 64 rows at once, or 16), and nothing promises that they round alike. So the first tile of each list is the reference,
and another one is used only where it was measured on this device to give the reference's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cloister.backends.torch.triton.matmul import TileConfig

HALF_TILES: Final = (
    TileConfig(64, 64, 4, 3),
    TileConfig(128, 256, 8, 3),
    TileConfig(128, 128, 8, 3),
    TileConfig(64, 32, 4, 4),
    TileConfig(16, 64, 4, 4),
    TileConfig(16, 32, 4, 4),
)
"""For weights of 16 bits; the reference first."""
CODE_TILES: Final = (
    TileConfig(64, 64, 4, 3),
    TileConfig(128, 128, 8, 3),
    TileConfig(64, 32, 4, 4),
    TileConfig(16, 64, 4, 4),
    TileConfig(16, 32, 4, 4),
)
"""For weights of 8 bits or fewer, whose scales and codes need more registers."""
FLOAT_TILES: Final = (TileConfig(64, 64, 4, 3), TileConfig(16, 64, 4, 3), TileConfig(16, 32, 4, 3))
"""For weights in float32, which tensor cores do not take."""
NUM_ROWS: Final = 130
"""Rows that are compared: more than the largest tile has."""


class TileBook:
    """Remembers, for each kind of product, the tiles that agree.

    Args:
        num_places: multiprocessors, which a product should keep busy.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._agreeing: dict[Hashable, tuple[TileConfig, ...]] = {}

    def measure(
        self,
        kind: Hashable,
        product: Callable[[torch.dtype, TileConfig], Tensor],
        tiles: Sequence[TileConfig],
        dtype: torch.dtype,
    ) -> tuple[TileConfig, ...]:
        """Returns the tiles that agree with the first, computing `product` with each if `kind` is new.

        They are compared in float32. On a device a product of type `dtype`, which layers want, is computed too, so that its
        kernel is compiled before the first prompt comes.
        """
        if kind not in self._agreeing:
            reference = product(torch.float32, tiles[0])
            others = [tile for tile in tiles[1:] if self._agrees(product, tile, reference)]
            self._agreeing[kind] = tuple(sorted((tiles[0], *others), key=lambda tile: -tile.rows * tile.columns))
            for tile in self._agreeing[kind] if reference.is_cuda else ():
                product(dtype, tile)
        return self._agreeing[kind]

    def choose(self, tiles: Sequence[TileConfig], num_rows: int, num_outputs: int) -> TileConfig:
        """Returns the largest tile that wastes no rows and keeps the device busy, or the smallest."""
        for tile in tiles:
            num_programs = -(-num_rows // tile.rows) * -(-num_outputs // tile.columns)
            if num_programs >= self._num_places and tile.rows < 2 * max(num_rows, 16):
                return tile
        return tiles[-1]

    @staticmethod
    def _agrees(product: Callable[[torch.dtype, TileConfig], Tensor], tile: TileConfig, reference: Tensor) -> bool:
        try:
            return torch.equal(product(torch.float32, tile), reference)
        except OutOfResources:  # the device has less shared memory than the tile wants
            return False


def random_rows(num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns rows to compare products on; of thousands of sums, some would round otherwise in another order."""
    rows = torch.randn(NUM_ROWS, num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    return rows.to(device, dtype)
