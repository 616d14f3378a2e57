"""Measures how fast a directory, or memory, can be read: the upper bound for a KV tier there (`cloister bench io`)."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cloister.engine.kv_tier_reads import (
    DISK_ENGINES,
    MEMORY_ENGINES,
    READ_ENGINES,
    ReadPattern,
    ReadRate,
    list_patterns,
    measure_reads,
    recommend,
)
from cloister.engine.machine import read_machine
from cloister.types.errors import ConfigError

BLOCKS: Final = (16 * 2**10, 64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)
DEPTHS: Final = (1, 2, 4, 8)
CACHED: Final = "pread, cached"
"""Name of reads from the page cache."""
LARGEST_SHARE: Final = 0.9
"""Largest share of the free space that is written."""
CELL_S: Final = 0.25
_SYNC_BYTES: Final = 8 * 2**20
_WRITE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class StorageReport:
    """The results of a measurement.

    Attributes:
        num_bytes: size of the file; less than requested if writing is slow.
        write_bytes_s: rate of sequential writes of 1 MiB, including the sync to disk.
        rates: rates of reads that miss the page cache.
        cached_rates: rates of reads that hit it; empty for memory.
        left_out: read engines that this file system does not support.
        recommended: the read pattern for a tier; None if nothing was measured in time.
        is_complete: whether everything was measured within the time limit.
    """

    num_bytes: int
    write_bytes_s: float
    rates: list[ReadRate]
    cached_rates: list[ReadRate]
    left_out: list[str]
    recommended: ReadPattern | None
    is_complete: bool


def count_cells(*, is_memory: bool) -> int:
    """Returns the number of progress steps of `measure_storage`: one for writing, and one for each pattern."""
    return 1 + len(_patterns(is_memory=is_memory)) + (0 if is_memory else len(_cached_patterns()))


def measure_storage(
    directory: Path | None, num_bytes: int, *, timeout_s: float, on_progress: Callable[[], None] = lambda: None
) -> StorageReport:
    """Measures a directory, or memory for None. The file has no name, so it vanishes even if the process is killed.

    Raises:
        ConfigError: the directory cannot be used, is full, or does not answer in time.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        with _open(directory, num_bytes) as fd:
            return _measure(fd, num_bytes, deadline_s, is_memory=directory is None, on_progress=on_progress)
    except TimeoutError:
        raise ConfigError(
            f"{directory} has not answered a read within {timeout_s:g} s; choose another directory, or give it longer",
            param="timeout_s",
        ) from None
    except OSError as error:
        raise ConfigError(_explain(directory, num_bytes, error), param="directory") from None


def _measure(fd: int, num_bytes: int, deadline_s: float, *, is_memory: bool, on_progress: Callable[[], None]) -> StorageReport:
    started_s = time.monotonic()
    num_bytes = _fill(fd, num_bytes, started_s + (deadline_s - started_s) / 3)
    write_bytes_s = num_bytes / (time.monotonic() - started_s)
    on_progress()
    patterns = [pattern for pattern in _patterns(is_memory=is_memory) if pattern.block_bytes <= num_bytes]
    rates, left_out = list[ReadRate](), list[str]()
    measured = measure_reads(fd, num_bytes, patterns, cell_s=CELL_S, deadline_s=deadline_s, is_cached=is_memory)
    num_done = 0
    for pattern, rate in zip(patterns, measured, strict=False):
        if rate is not None:
            rates.append(rate)
        elif pattern.engine not in left_out:
            left_out.append(pattern.engine)
        num_done += 1
        on_progress()
    cached = [] if is_memory else [pattern for pattern in _cached_patterns() if pattern.block_bytes <= num_bytes]
    cached_rates = []
    if cached:
        _fill_page_cache(fd, num_bytes, deadline_s)
    for rate in measure_reads(fd, num_bytes, cached, cell_s=CELL_S, deadline_s=deadline_s, is_cached=True):
        if rate is not None:
            cached_rates.append(replace(rate, pattern=replace(rate.pattern, engine=CACHED)))
        num_done += 1
        on_progress()
    usable = [rate for rate in rates if rate.pattern.engine in (MEMORY_ENGINES if is_memory else DISK_ENGINES)]
    return StorageReport(
        num_bytes,
        write_bytes_s,
        rates,
        cached_rates,
        left_out,
        recommend(usable) if usable else None,
        num_done == len(patterns) + len(cached),
    )


def _patterns(*, is_memory: bool) -> list[ReadPattern]:
    return list_patterns(MEMORY_ENGINES if is_memory else list(READ_ENGINES), BLOCKS, DEPTHS)


def _cached_patterns() -> list[ReadPattern]:
    return list_patterns(["pread"], BLOCKS, DEPTHS)


@contextlib.contextmanager
def _open(directory: Path | None, num_bytes: int) -> Iterator[int]:
    """Raises OSError (ENOSPC), before anything is written, if a file of this size would take nearly all that is free."""
    if directory is None:
        fd = os.memfd_create("cloister-bench")
        try:
            _check_room(num_bytes, read_machine().available_bytes)
            yield fd
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryFile(prefix="cloister-bench-", dir=directory) as file:
            space = os.fstatvfs(file.fileno())
            _check_room(num_bytes, space.f_bavail * space.f_frsize)
            yield file.fileno()


def _check_room(num_bytes: int, free_bytes: int) -> None:
    if num_bytes > LARGEST_SHARE * free_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill(fd: int, num_bytes: int, until_s: float) -> int:
    """Writes up to `num_bytes` incompressible bytes until the deadline; returns how many were written."""
    content = os.urandom(_SYNC_BYTES)
    done = 0
    while done < num_bytes and (time.monotonic() < until_s or not done):
        for first in range(0, min(_SYNC_BYTES, num_bytes - done), _WRITE_BYTES):
            part = content[first : first + min(_WRITE_BYTES, num_bytes - done)]
            if os.pwrite(fd, part, done) < len(part):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += len(part)
        os.fdatasync(fd)
    return done


def _fill_page_cache(fd: int, num_bytes: int, deadline_s: float) -> None:
    place = 0
    while place < num_bytes and time.monotonic() < deadline_s:
        os.pread(fd, _WRITE_BYTES, place)
        place += _WRITE_BYTES


def _explain(directory: Path | None, num_bytes: int, error: OSError) -> str:
    """Returns an error message: what happened, and what to do."""
    size = f"{num_bytes / 2**20:.0f} MiB"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
        where = "memory" if directory is None else directory
        return f"{where} has no room for a file of {size}; give a smaller --size-mb, or name another directory"
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    if error.errno == errno.ENOENT and directory is not None and directory.is_dir():
        reason = "no file can be made there"
    return f"cannot measure {directory}: {reason}; name a directory that this user may write to and read from"
