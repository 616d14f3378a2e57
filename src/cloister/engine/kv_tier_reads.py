"""Ways to read a tier's file (the call, the size of a read, the number of concurrent reads), and their speed.

`cloister bench io` measures a directory with the same code as a tier does at its start.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Protocol

import numpy as np

from cloister.engine.read_ring import ReadRing

PAGE_BYTES: Final = 4096
RING_PARTS: Final = 8
"""Parts of a read by io_uring."""
GOOD_SHARE: Final = 0.9
"""A pattern that reaches this share of the best bandwidth is preferred if it needs fewer concurrent reads, or smaller ones."""


@dataclass(frozen=True, slots=True)
class ReadPattern:
    """How a file is read.

    Attributes:
        engine: a name of `READ_ENGINES`.
        block_bytes: bytes of each read.
        depth: reads at a time, each in a thread of its own.
    """

    engine: str
    block_bytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class ReadRate:
    """What one pattern reached.

    Attributes:
        bytes_s: bytes a second of all threads together.
        p50_s, p99_s: time of one read.
        num_reads: reads that were measured.
    """

    pattern: ReadPattern
    bytes_s: float
    p50_s: float
    p99_s: float
    num_reads: int


class FileReader(Protocol):
    """Reads one file, in any number of threads."""

    def read(self, place: int, num_bytes: int) -> memoryview:
        """Returns these bytes, fewer at the end of the file; they are valid until this thread's next read.

        Args:
            place: where they begin: a multiple of `PAGE_BYTES`.

        Raises:
            OSError: they cannot be read.
        """
        ...


class _CallReader:
    """`preadv` into a buffer of each thread.

    Args:
        fd: the file, which stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffers = threading.local()

    def read(self, place: int, num_bytes: int) -> memoryview:
        buffer = self._buffer(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
        return buffer[: min(num_bytes, os.preadv(self._fd, [buffer], place))]

    def _buffer(self, num_bytes: int) -> memoryview:
        buffer: memoryview | None = getattr(self._buffers, "all", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers.all = memoryview(mmap.mmap(-1, num_bytes))  # begins at a page, as O_DIRECT needs
        return buffer[:num_bytes]


class _DirectReader(_CallReader):
    """The same past the page cache (O_DIRECT).

    Raises:
        OSError: the file system has no such reads.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        weakref.finalize(self, os.close, self._fd)  # not before the last thread that uses it has ended


class _MappedReader:
    """A map of the file, without a copy. A file that others could shorten must not be read like this: the process would die."""

    def __init__(self, fd: int) -> None:
        self._view = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))

    def read(self, place: int, num_bytes: int) -> memoryview:
        return self._view[place : place + num_bytes]


class _RingReader(_DirectReader):
    """The same by io_uring: one thread keeps all pages of a read in flight, in a few parts.

    Raises:
        OSError: the file system has no such reads, or this kernel or sandbox no io_uring.
    """

    def __init__(self, fd: int) -> None:
        ReadRing(RING_PARTS)
        super().__init__(fd)
        self._rings = threading.local()

    def read(self, place: int, num_bytes: int) -> memoryview:
        ring: ReadRing | None = getattr(self._rings, "own", None)
        if ring is None:
            ring = self._rings.own = ReadRing(RING_PARTS)
        buffer = self._buffer(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
        part_bytes = -(-len(buffer) // (RING_PARTS * PAGE_BYTES)) * PAGE_BYTES
        try:
            return buffer[: min(num_bytes, ring.read(self._fd, buffer, place, part_bytes))]
        except BaseException:
            del self._rings.own  # its next read begins with another one
            raise


READ_ENGINES: Final[dict[str, Callable[[int], FileReader]]] = {
    "pread": _CallReader,
    "direct": _DirectReader,
    "io_uring": _RingReader,
    "mmap": _MappedReader,
}
"""pread: through the page cache; direct: past it; io_uring: past it, in parts that one thread keeps in flight; mmap: a map."""
DISK_ENGINES: Final[tuple[str, ...]] = ("pread", "direct", "io_uring")
"""Those for a tier on a disk: a read of a map that fails ends the process."""
MEMORY_ENGINES: Final = ("pread", "mmap")
"""Those for a tier in memory."""


def list_patterns(engines: Sequence[str], blocks: Sequence[int], depths: Sequence[int]) -> list[ReadPattern]:
    """Returns all combinations."""
    return [ReadPattern(*pattern) for pattern in product(engines, blocks, depths)]


def measure_reads(
    fd: int,
    num_bytes: int,
    patterns: Sequence[ReadPattern],
    *,
    cell_s: float,
    deadline_s: float,
    is_cached: bool = False,
    is_ended: Callable[[], bool] = lambda: False,
) -> Iterator[ReadRate | None]:
    """Measures patterns on a file, in random order of its blocks; yields None for one that the file system does not have.

    Args:
        fd: a file of at least `num_bytes`, whose contents are on the disk.
        cell_s: longest time for each pattern; all blocks are read once at most.
        deadline_s: on the monotonic clock; what was not measured by then is left out.
        is_cached: the page cache is kept and filled; else it is dropped before each pattern.
        is_ended: whether to leave the rest out.

    Raises:
        TimeoutError: a read has not ended by the deadline.
    """
    for pattern in patterns:
        if time.monotonic() >= deadline_s or is_ended():
            return
        if not is_cached:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield _measure(pattern, fd, num_bytes, min(deadline_s, time.monotonic() + cell_s), deadline_s)


def _measure(pattern: ReadPattern, fd: int, num_bytes: int, end_s: float, deadline_s: float) -> ReadRate | None:
    """Measures one pattern. Its reader ends with it: pages of a map that is still there would stay in the page cache."""
    try:
        reader = READ_ENGINES[pattern.engine](fd)
    except OSError:
        return None
    places = list(range(0, max(1, num_bytes // pattern.block_bytes) * pattern.block_bytes, pattern.block_bytes))
    random.Random(0).shuffle(places)
    block_bytes, taken_s, errors = min(pattern.block_bytes, num_bytes), list[float](), list[OSError]()

    def read_some() -> None:
        into = np.empty(block_bytes, np.uint8)
        try:
            while not taken_s or time.monotonic() < end_s:  # a late thread still reads once
                place = places.pop()
                started_s = time.perf_counter()
                content = reader.read(place, block_bytes)
                if pattern.engine == "mmap":  # a map reads when somebody looks; numpy lets other threads run meanwhile
                    np.copyto(into[: len(content)], np.frombuffer(content, np.uint8))
                taken_s.append(time.perf_counter() - started_s)
        except IndexError:
            pass
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=read_some, daemon=True) for _ in range(pattern.depth)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()) + 1.0)
        if thread.is_alive():
            raise TimeoutError
    elapsed_s = time.perf_counter() - started_s
    if errors or not taken_s:
        return None
    taken_s.sort()
    num_reads = len(taken_s)
    return ReadRate(
        pattern, num_reads * block_bytes / elapsed_s, taken_s[num_reads // 2], taken_s[num_reads * 99 // 100], num_reads
    )


def recommend(rates: Sequence[ReadRate]) -> ReadPattern:
    """Returns the pattern with the fewest reads at a time, then with the smallest ones, that is about as fast as the best.

    Raises:
        ValueError: nothing was measured.
    """
    enough = GOOD_SHARE * max(rate.bytes_s for rate in rates)
    good = [rate for rate in rates if rate.bytes_s >= enough]
    return min(good, key=lambda rate: (rate.pattern.depth, rate.pattern.block_bytes, -rate.bytes_s)).pattern
