"""An array of integers that grows: token rows and block tables cost what they hold, not what they might."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class GrowingInts:
    """int32 values with amortised O(1) append."""

    __slots__ = ("_size", "_store")

    def __init__(self, values: npt.ArrayLike = ()) -> None:
        self._store: IntArray = np.array(values, dtype=np.int32)
        self._size = self._store.size

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> IntArray:
        """The values, [len(self)], until the next append."""
        return self._store[: self._size]

    def append(self, value: int) -> None:
        self._reserve(self._size + 1)
        self._store[self._size] = value
        self._size += 1

    def copy(self) -> GrowingInts:
        return GrowingInts(self.view)

    def clear(self) -> None:
        """Forgets the values, and overwrites them with zeros."""
        self._store.fill(0)
        self._size = 0

    def _reserve(self, size: int) -> None:
        if size > self._store.size:
            store = np.zeros(max(size, 2 * self._store.size, 16), np.int32)
            store[: self._size] = self.view
            self._store = store
