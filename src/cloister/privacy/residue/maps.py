"""What a process has mapped, and which pages of it there are. Linux only; reads /proc/PID/maps, pagemap and mem.

A page that was never touched is neither present nor swapped and holds nothing. Pages of a file that were not changed are the
file's, whoever maps them, and are read once. (Documentation/admin-guide/mm/pagemap.rst: bit 63 present, 62 swapped, 61 of a
file or shared.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_KERNELS: Final = frozenset({"[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]"})
"""Pages that the kernel shows to every process, the same to all."""
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps.

    Attributes:
        rights: such as "rw-p".
        offset: of the first page in the file.
        file: (device, inode) of what is mapped, or None for memory of no file.
        name: path, "[heap]", "[stack]" or "".
    """

    start: int
    end: int
    rights: str
    offset: int
    file: tuple[str, int] | None
    name: str

    @property
    def is_kernels(self) -> bool:
        return self.name in _KERNELS

    @property
    def num_pages(self) -> int:
        return (self.end - self.start) // PAGE

    def describe(self) -> str:
        """What an operator may read about it: no address, which would differ in every run."""
        return f"{self.name or 'anonymous'} ({self.rights})"


def read_maps(pid: int) -> list[Mapping]:
    """Returns the mappings of a process, the kernel's own left out.

    Raises:
        OSError: it ended, or may not be read.
    """
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        span, rights, offset, device, inode, *name = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in span.split("-"))
        file = (device, int(inode)) if int(inode) else None
        mapping = Mapping(start, end, rights, int(offset, 16), file, name[0] if name else "")
        if not mapping.is_kernels:
            found.append(mapping)
    return found


@dataclass(frozen=True, slots=True)
class ResidentPages:
    """The pages of one mapping that hold something.

    Attributes:
        present: [num_pages] bool: in memory or in swap.
        of_file: [num_pages] bool: unchanged pages of a file, or memory that is shared.
        num_swapped: of them in swap.
    """

    present: npt.NDArray[np.bool_]
    of_file: npt.NDArray[np.bool_]
    num_swapped: int


def read_pages(pagemap: int, mapping: Mapping) -> ResidentPages:
    """Returns which pages of a mapping there are.

    Args:
        pagemap: descriptor of the open /proc/PID/pagemap.

    Raises:
        OSError: the kernel says nothing about them.
    """
    size, at = mapping.num_pages * 8, mapping.start // PAGE * 8
    data = b""
    while len(data) < size:
        piece = os.pread(pagemap, min(size - len(data), 1 << 22), at + len(data))
        if not piece:
            raise OSError("the list of pages ends before the mapping does")
        data += piece
    entries = np.frombuffer(data, np.uint64)
    swapped = (entries & _SWAPPED) != 0
    return ResidentPages((entries & _PRESENT) != 0 | swapped, (entries & _OF_FILE) != 0, int(swapped.sum()))


def runs_of(wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields (first, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
