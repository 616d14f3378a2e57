"""Block tables of every sequence held, in one matrix: a step gathers its rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class BlockTables:
    """One row of block ids per slot; rows and columns double as they are needed.

    Attributes:
        sizes: how many entries of each slot's row are its table.
    """

    __slots__ = ("_rows", "sizes")

    def __init__(self, num_slots: int) -> None:
        self._rows: IntArray = np.zeros((num_slots, 16), np.int32)
        self.sizes = [0] * num_slots

    def replace_from(self, slot: int, start: int, block_ids: Sequence[int]) -> None:
        """Makes the table of `slot` from entry `start` (at most its size) on become `block_ids`."""
        if start > self.sizes[slot]:
            raise IndexError("a gap would be left")
        size = start + len(block_ids)
        if size > self._rows.shape[1]:
            self._widen(size)
        self._rows[slot, start:size] = block_ids
        self.sizes[slot] = size

    def copy(self, source: int, target: int) -> None:
        """Gives `target` the table of `source`."""
        self._rows[target] = self._rows[source]
        self.sizes[target] = self.sizes[source]

    def gather(self, slots: Sequence[int], width: int) -> IntArray:
        """Returns the first `width` entries of some rows, [len(slots), width]; what lies past a table has no meaning."""
        return self._rows[slots, :width]

    def add_slots(self, num_slots: int) -> None:
        """Appends rows for `num_slots` more slots."""
        self._rows = np.concatenate([self._rows, np.zeros((num_slots, self._rows.shape[1]), np.int32)])
        self.sizes += [0] * num_slots

    def _widen(self, size: int) -> None:
        more = max(size - self._rows.shape[1], self._rows.shape[1])
        self._rows = np.pad(self._rows, ((0, 0), (0, more)))
