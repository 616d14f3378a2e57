"""Searches all memory of a node's processes, and the files that they could have written.

It runs from outside: it needs the right to trace (root, or CAP_SYS_PTRACE), and the node has no hook for it. It lists what it
cannot read; a search with such gaps proves nothing.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.trust.residue.finder import LIST_KIND, Bytes, Finder, ListFinder
from cloister.trust.residue.processes import PAGE, Mapping, Process, read_maps, read_pages, runs_of

BLOCK_BYTES: Final = 1 << 18  # stays in the cache of a core
NUM_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Find:
    """A found needle: location and kind, without the content.

    Attributes:
        place: mapping or file.
        owner: owner of the needle.
    """

    where: str
    place: str
    kind: str
    owner: int


@dataclass(slots=True)
class Searched:
    """The search of one process, or of files.

    Attributes:
        gaps: what could not be read, and why.
        num_swapped: number of pages in swap, where memory outlives its process.
    """

    where: str
    finds: list[Find] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_mappings: int = 0
    num_swapped: int = 0
    elapsed_s: float = 0.0

    def by_kind(self) -> Counter[tuple[str, str]]:
        """Counts finds by (place, kind)."""
        return Counter((find.place, find.kind) for find in self.finds)


Runs = Sequence[tuple[int, tuple[int, ...]]]
"""(owner, token ids) of marks."""


def search_process(
    process: Process, finder: Finder, done_files: set[tuple[str, int, int]] | None = None, runs: Runs = ()
) -> Searched:
    """Searches every mapping of one process, even those that the process itself cannot read.

    Args:
        done_files: (device, inode, page) of unmodified file pages that were already searched in any process; updated.
        runs: runs of token ids, also searched for as lists of Python integers.
    """
    done_files = set() if done_files is None else done_files
    begun_s = time.monotonic()
    searched = Searched(str(process))
    try:
        mappings = read_maps(process.pid)
        memory = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY)
        pagemap = os.open(f"/proc/{process.pid}/pagemap", os.O_RDONLY)
    except OSError as error:
        searched.gaps.append(f"the process cannot be read: {error.strerror}")
        return searched
    spans: list[tuple[Mapping, int, int]] = []
    try:
        for mapping in mappings:
            searched.num_mappings += 1
            try:
                pages = read_pages(pagemap, mapping)
            except OSError as error:
                searched.gaps.append(f"{mapping.describe()}: {error.strerror or error}")
                continue
            searched.num_swapped += pages.num_swapped
            wanted = pages.present
            if mapping.file is not None:
                wanted = wanted & ~_done(mapping, pages.present & pages.of_file, done_files)
            spans += [(mapping, mapping.start + a * PAGE, mapping.start + b * PAGE) for a, b in runs_of(wanted)]
        pieces = [(m, at, min(at + BLOCK_BYTES, end), end) for m, start, end in spans for at in range(start, end, BLOCK_BYTES)]
        lists = ListFinder(runs)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for found in pool.map(lambda piece: _search_piece(memory, finder, lists, *piece), pieces):
                searched.num_bytes += found.num_bytes
                searched.gaps += found.gaps
                searched.finds += [Find(searched.where, find.place, find.kind, find.owner) for find in found.finds]
            lists.settle()
            for more in pool.map(lambda piece: _search_lists(memory, lists, *piece), pieces if runs else []):
                searched.finds += [Find(searched.where, find.place, find.kind, find.owner) for find in more]
    finally:
        os.close(memory)
        os.close(pagemap)
    searched.elapsed_s = time.monotonic() - begun_s
    return searched


def search_all(processes: Iterable[Process], finder: Finder, runs: Runs = ()) -> list[Searched]:
    """Searches processes; file pages mapped by several are searched once."""
    done: set[tuple[str, int, int]] = set()
    return [search_process(process, finder, done, runs) for process in processes]


def search_file(path: str, descriptor: int, finder: Finder) -> Searched:
    """Searches a whole file."""
    searched = Searched("files")
    size, at = os.fstat(descriptor).st_size, 0
    while at < size:
        data = os.pread(descriptor, BLOCK_BYTES + finder.reach, at)
        if not data:
            break
        block = np.frombuffer(data, np.uint8)
        searched.finds += [
            Find("files", path, match.needle.kind, match.needle.owner) for match in finder.find(block) if match.at < BLOCK_BYTES
        ]
        searched.num_bytes += min(len(data), BLOCK_BYTES)
        at += BLOCK_BYTES
    return searched


def _search_piece(memory: int, finder: Finder, lists: ListFinder, mapping: Mapping, at: int, end: int, limit: int) -> Searched:
    """Searches from `at` to `end`, and beyond it (up to `limit`) for needles that begin before `end`."""
    piece = Searched("")
    try:
        block = _read(memory, at, min(end + finder.reach, limit))
    except OSError as error:
        piece.gaps.append(f"{mapping.describe()}: {error.strerror}")
        return piece
    piece.num_bytes = end - at
    if block.any():
        place = mapping.describe()
        matches = [match.needle for match in finder.find(block) if match.at < end - at]
        piece.finds = [Find("", place, needle.kind, needle.owner) for needle in matches]
        lists.note(block, at)
    return piece


def _search_lists(memory: int, lists: ListFinder, mapping: Mapping, at: int, end: int, limit: int) -> list[Find]:
    try:
        block = _read(memory, at, min(end + PAGE, limit))
    except OSError:  # from the first pass
        return []
    return [Find("", mapping.describe(), LIST_KIND, owner) for place, owner in lists.find(block) if place < end - at]


def _read(memory: int, start: int, end: int) -> Bytes:
    """Reads memory of a process.

    Raises:
        OSError: the memory cannot be read.
    """
    data = os.pread(memory, end - start, start)
    while len(data) < end - start:
        more = os.pread(memory, end - start - len(data), start + len(data))
        if not more:
            raise OSError(0, "the kernel gives no bytes")
        data += more
    return np.frombuffer(data, np.uint8)


def _done(mapping: Mapping, of_file: npt.NDArray[np.bool_], done: set[tuple[str, int, int]]) -> npt.NDArray[np.bool_]:
    """Returns which pages were already searched, and marks the others."""
    known = np.zeros(len(of_file), bool)
    assert mapping.file is not None
    first = mapping.offset // PAGE
    for page in np.flatnonzero(of_file):
        key = (*mapping.file, first + int(page))
        known[page] = key in done
        done.add(key)
    return known


def found_in(searched: Sequence[Searched]) -> Iterator[Find]:
    """Yields every find."""
    for one in searched:
        yield from one.finds


# Files a node may have left data in: open and deleted ones, shared memory, and files changed since its start.


_WRITES: Final = os.O_WRONLY | os.O_RDWR
USUAL_ROOTS: Final = ("/dev/shm", "/tmp", "/var/tmp", "/var/log", "/var/cache", "/var/lib", "/run")


def search_files(processes: Iterable[Process], finder: Finder, *, since_s: float, roots: Iterable[str | Path]) -> Searched:
    """Searches the files that processes have open for writing, and those under `roots` that changed since `since_s`.

    Args:
        since_s: seconds since the epoch.
        roots: directories; missing ones are skipped. The current directories of the processes are included.
    """
    found = Searched("files")
    done: set[tuple[int, int]] = set()
    directories = {str(root) for root in roots}
    for process in processes:
        with suppress(OSError):
            directories.add(os.readlink(f"/proc/{process.pid}/cwd"))
        for path in _open_files(process, found):
            _search(path, path, finder, done, found)
    for path in _changed(_outermost(directories), since_s):
        _search(path, path, finder, done, found)
    _look_at_segments(processes, found)
    return found


def _search(path: str, name: str, finder: Finder, done: set[tuple[int, int]], found: Searched) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        found.gaps.append(f"{name}: {error.strerror}")
        return
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and _identity(status) not in done:
            done.add(_identity(status))
            one = search_file(name, descriptor, finder)
            found.finds += one.finds
            found.num_bytes += one.num_bytes
            found.num_mappings += 1
    except OSError as error:
        found.gaps.append(f"{name}: {error.strerror}")
    finally:
        os.close(descriptor)


def _open_files(process: Process, found: Searched) -> Iterator[str]:
    """Yields paths to the regular files that a process could write to, including deleted and in-memory ones."""
    base = f"/proc/{process.pid}"
    try:
        numbers = os.listdir(f"{base}/fd")
    except OSError as error:
        found.gaps.append(f"open files of {process.pid}: {error.strerror}")
        return
    for number in numbers:
        with suppress(OSError, StopIteration):
            lines = Path(f"{base}/fdinfo/{number}").read_text().splitlines()
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
            is_regular = stat.S_ISREG(os.stat(f"{base}/fd/{number}").st_mode)
            is_deleted = os.readlink(f"{base}/fd/{number}").endswith("(deleted)")
            if is_regular and (flags & _WRITES or is_deleted):
                yield f"{base}/fd/{number}"


def _changed(roots: Iterable[str], since_s: float) -> Iterator[str]:
    for root in roots:
        for directory, _, names in os.walk(root):
            for name in names:
                path = os.path.join(directory, name)
                with suppress(OSError):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode) and max(status.st_mtime, status.st_ctime) >= since_s:
                        yield path


def _outermost(directories: Iterable[str]) -> list[str]:
    """Skips directories inside others, and those that are not on a disk or in memory."""
    kept: list[str] = []
    for path in sorted({os.path.realpath(directory) for directory in directories}):
        if path.startswith(("/proc", "/sys")) or path == "/" or not os.path.isdir(path):
            continue
        if not any(path == outer or path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return kept


def _look_at_segments(processes: Iterable[Process], found: Searched) -> None:
    """A System V shared memory segment created by the node but mapped by no process cannot be read from outside."""
    pids = {process.pid for process in processes}
    with suppress(OSError):
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[4]) in pids and int(fields[6]) == 0:
                found.gaps.append("a segment of System V shared memory that no process maps")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# Search results as text and as data: counts, kinds and locations, never content.

_MOST_PLACES = 12


def describe(searched: Sequence[Searched], roles: dict[str, str], shapes: dict[int, str]) -> Iterator[str]:
    """Yields lines for an operator: what was searched, and the finds by location, kind and request shape."""
    for one in searched:
        role = roles.get(one.where, "files")
        rate = f", {one.num_bytes / one.elapsed_s / 1e6:.0f} MB/s" if one.elapsed_s else ""
        swapped = f", {one.num_swapped} pages in swap" if one.num_swapped else ""
        found = f"{len(one.finds)} finds" if one.finds else "nothing"
        yield f"{role} ({_short(one.where)}): {one.num_bytes / 2**20:.0f} MiB in {one.num_mappings}{rate}{swapped}: {found}"
        for (place, kind), count in one.by_kind().most_common(_MOST_PLACES):
            yield f"    {count} x {kind} in {place}"
        by_shape = Counter(shapes.get(find.owner, "?") for find in one.finds)
        if by_shape:
            yield "    of: " + ", ".join(f"{shape} {count}" for shape, count in by_shape.most_common())


def to_data(searched: Sequence[Searched], roles: dict[str, str], shapes: dict[int, str]) -> list[dict[str, object]]:
    """Returns the same as data for JSON."""
    return [
        {
            "role": roles.get(one.where, "files"),
            "where": one.where,
            "bytes": one.num_bytes,
            "mappings": one.num_mappings,
            "swapped_pages": one.num_swapped,
            "seconds": round(one.elapsed_s, 3),
            "gaps": one.gaps,
            "finds": [{"place": p, "kind": k, "count": c} for (p, k), c in one.by_kind().most_common()],
            "finds_by_shape": dict(Counter(shapes.get(find.owner, "?") for find in one.finds)),
        }
        for one in searched
    ]


def _short(where: str) -> str:
    return where if len(where) <= 60 else where[:57] + "..."
