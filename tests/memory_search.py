"""Looks for numbers in the memory of this process, as somebody with a dump of it would."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

CAN_SEARCH = Path("/proc/self/pagemap").exists()
_PIECE_WORDS = 1 << 17  # half a MB stays in the cache of a core between copying and comparing
_PAGE_BYTES = mmap.PAGESIZE
_IN_MEMORY_OR_SWAPPED = np.uint64(3 << 62)
"""Bits of an entry of /proc/self/pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst)."""

Words = npt.NDArray[np.uint32]


class Needle:
    """A few numbers in a row, kept inverted, so that it does not find itself.

    Args:
        values: [n] float32 of at least four numbers; they are overwritten with zeros here.
    """

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self._inverted: Words = np.bitwise_not(values.view(np.uint32))
        values[:] = 0

    def count(self) -> int:
        """Returns how often the numbers lie in the memory that this process can write."""
        return count_each([self])[0]

    def _count_in(self, words: Words) -> int:
        (places,) = np.nonzero(words[: len(words) - len(self._inverted) + 1] == ~self._inverted[0])
        return sum(np.array_equal(~words[at : at + len(self._inverted)], self._inverted) for at in places)


def count_each(needles: Sequence[Needle]) -> list[int]:
    """Returns `count` of each; memory is read once for all of them, which costs twenty times what comparing does."""
    counts = np.zeros(len(needles), np.int64)
    for words in _memory():
        counts += [needle._count_in(words) for needle in needles]
    return counts.tolist()


def find_any(needles: Sequence[Needle]) -> bool:
    """True if one of them lies there."""
    return any(count_each(needles))


def _memory() -> Iterator[Words]:
    """Yields the memory that this process can write, piece by piece."""
    piece = np.frombuffer(mmap.mmap(-1, 4 * _PIECE_WORDS), np.uint32)  # shared, and so not searched itself
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for start, end in _touched():
            for at in range(start, end, piece.nbytes):
                memory.seek(at)
                try:
                    num_words = (memory.readinto(piece.data) or 0) // 4
                except OSError:  # pages of the kernel's own
                    break
                yield piece[: min(num_words, (end - at) // 4)]


def _touched() -> Iterator[tuple[int, int]]:
    """Yields where pages lie that were ever written: most of what is writable never was, and holds nothing."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for start, end in _writable():
            pages.seek(start // _PAGE_BYTES * 8)
            entries = np.frombuffer(pages.read((end - start) // _PAGE_BYTES * 8), np.uint64)
            is_touched = np.concatenate([[False], (entries & _IN_MEMORY_OR_SWAPPED) != 0, [False]])
            for first, after in np.flatnonzero(is_touched[1:] != is_touched[:-1]).reshape(-1, 2).tolist():
                yield start + first * _PAGE_BYTES, start + after * _PAGE_BYTES


def _writable() -> Iterator[tuple[int, int]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, *_ = line.split()
        if rights == "rw-p":
            start, end = span.split("-")
            yield int(start, 16), int(end, 16)
