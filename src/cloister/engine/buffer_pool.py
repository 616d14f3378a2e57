"""Reusable memory. Opening a block into fresh memory takes several times as long, because the kernel clears each page when it
is first touched. Where fresh memory is unavoidable, one call clears it in a third of that time."""

from __future__ import annotations

import mmap
import weakref
from typing import Final

import numpy as np

_UNIT_BYTES: Final = 2**18
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)  # which only Linux has


class BufferPool:
    """Buffers for any number of threads.

    Args:
        most_bytes: kept while nobody uses it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        self._num_free_bytes = 0

    def take(self, num_bytes: int) -> memoryview:
        """Returns a buffer of this many bytes, with arbitrary contents. It returns to the pool when it and all of its parts are
        gone.
        """
        size = -(-max(1, num_bytes) // _UNIT_BYTES) * _UNIT_BYTES
        try:
            memory = self._free.setdefault(size, []).pop()
            self._num_free_bytes -= size
        except IndexError:
            memory = mmap.mmap(-1, size, flags=_FLAGS)
        view = np.frombuffer(memory, np.uint8)
        weakref.finalize(view, self._give_back, memory)
        return view.data[:num_bytes]

    def _give_back(self, memory: mmap.mmap) -> None:
        """Any thread may call it; counts may then be slightly off, and memory is bounded all the same."""
        size = len(memory)
        if self._num_free_bytes + size <= self._most_bytes:
            self._num_free_bytes += size
            self._free[size].append(memory)

    def close(self) -> None:
        """Keeps nothing from now on."""
        self._most_bytes = 0
        self._free = {size: [] for size in self._free}
