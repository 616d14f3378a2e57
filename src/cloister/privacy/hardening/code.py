"""Measure `code`: the machine code of this process is its own, and no longer a view of files that somebody may write to.

A page that is mapped from a file and was never changed is the file's page: who writes into a library in place changes the
code of every process that runs it, without a capability and past every measure that looks at calls (mmap(2), MAP_PRIVATE).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cloister.privacy.hardening import kernel
from cloister.privacy.hardening.measure import Missing, Needs

MADV_POPULATE_WRITE: Final = 23
PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
REMEDY: Final = "run on Linux 5.14 or newer"

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class CodePages:
    """Pages of a file that has code, with the rights that they are mapped with."""

    start: int
    size: int
    rights: int


class Code:
    name = "code"
    stops = "machine code that is rewritten on disk while it runs"

    def apply(self, needs: Needs) -> str:
        spans = list(spans_of_code(kernel.read_text("/proc/self/maps") or ""))
        if not spans:
            raise Missing("the kernel does not say what is mapped", "run on Linux, with /proc mounted")
        for span in spans:
            _own(span)
        return f"{sum(span.size for span in spans) / 2**20:.0f} MiB copied from their files"

    def probe(self) -> str:
        return "can be copied from its files"


def spans_of_code(maps: str) -> Iterator[CodePages]:
    """Yields every private mapping of each file of which some part can be executed: constants and data, too.

    Args:
        maps: what /proc/PID/maps says.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    with_code = {(device, inode) for _, rights, _, device, inode, *_ in lines if "x" in rights and inode != "0"}
    for span, rights, _, device, inode, *_ in lines:
        if (device, inode) in with_code and rights[3] == "p" and rights[:3] != "---":
            start, end = (int(edge, 16) for edge in span.split("-"))
            bits = PROT_READ * (rights[0] == "r") | PROT_WRITE * (rights[1] == "w") | PROT_EXEC * (rights[2] == "x")
            yield CodePages(start, end - start, bits)


def _own(span: CodePages) -> None:
    """Has the kernel make each page this process's own, as a write to it would; what stands there stays the same.

    Raises:
        Missing: the kernel does not do it.
    """
    at, size = ctypes.c_void_p(span.start), ctypes.c_size_t(span.size)
    done = _libc.mprotect(at, size, span.rights | PROT_READ | PROT_WRITE) == 0
    done = done and _libc.madvise(at, size, MADV_POPULATE_WRITE) == 0
    reason = os.strerror(ctypes.get_errno())
    if _libc.mprotect(at, size, span.rights) != 0 or not done:
        raise Missing(f"code could not be copied from its file ({reason})", REMEDY)
