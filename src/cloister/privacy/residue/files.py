"""Files that a node could have left something in: open ones, deleted ones, shared memory, and what changed since it started."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from cloister.privacy.residue.finder import Finder
from cloister.privacy.residue.processes import Process
from cloister.privacy.residue.scan import Searched, search_file

_WRITES: Final = os.O_WRONLY | os.O_RDWR
USUAL_ROOTS: Final = ("/dev/shm", "/tmp", "/var/tmp", "/var/log", "/var/cache", "/var/lib", "/run")


def search_files(
    processes: Iterable[Process], finder: Finder, *, since_s: float, roots: Iterable[str | Path], skip: Iterable[Path] = ()
) -> Searched:
    """Searches the files that processes hold open for writing, and those under `roots` that changed since then.

    Args:
        since_s: seconds since the epoch.
        roots: directories; whatever is missing is left out. The current directories of the processes count as well.
        skip: files of whoever searches, such as a report.
    """
    found = Searched("files")
    done = {_identity(os.stat(path)) for path in skip if path.exists()}
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
    """Yields ways to the regular files that a process could write to; deleted ones and those of memory included."""
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
    """Leaves out what lies inside another one, and what is no directory of disks or memory."""
    kept: list[str] = []
    for path in sorted({os.path.realpath(directory) for directory in directories}):
        if path.startswith(("/proc", "/sys")) or path == "/" or not os.path.isdir(path):
            continue
        if not any(path == outer or path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return kept


def _look_at_segments(processes: Iterable[Process], found: Searched) -> None:
    """A segment of System V memory that a process of the node made, and nobody maps, cannot be read from outside."""
    pids = {process.pid for process in processes}
    with suppress(OSError):
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[4]) in pids and int(fields[6]) == 0:
                found.gaps.append("a segment of System V shared memory that nobody maps")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
