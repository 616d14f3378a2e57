"""A node's processes and their memory maps. Linux only; reads /proc.

A process that has ended is listed but not searched, because its pages were returned to the kernel. The list is made by polling,
so a process that lives for less than `LOOK_EVERY_S` may be missing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

LOOK_EVERY_S: Final = 0.02
FREEZE_TIMEOUT_S: Final = 5.0
_STOPPED: Final = frozenset("TtZX")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the node.

    Attributes:
        started: clock ticks since boot; together with the pid a unique identifier.
        name: its process name.
        command: its arguments, if the kernel still shows them.
    """

    pid: int
    parent: int
    started: int
    name: str
    command: str

    def __str__(self) -> str:
        return f"{self.pid} {self.name} {self.command}".strip()


class ProcessTree:
    """Watches processes and their children from outside.

    Args:
        roots: pids started by the caller.

    Attributes:
        seen: all processes seen so far, by (pid, start).
    """

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = frozenset(roots)
        self.seen: dict[tuple[int, int], Process] = {}
        self._stop = threading.Event()
        self._is_frozen = False
        self._thread = threading.Thread(target=self._watch, name="family watch", daemon=True)

    def __enter__(self) -> ProcessTree:
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def alive(self) -> list[Process]:
        """Returns the processes that are alive; those whose parent died stay included."""
        everybody = list(_everybody())
        members = set(self._roots) | {pid for pid, start in self.seen if _is_among(pid, start, everybody)}
        grows = True
        while grows:
            more = {process.pid for process in everybody if process.parent in members} - members
            grows = bool(more)
            members |= more
        found = [replace(process, command=_command(process.pid)) for process in everybody if process.pid in members]
        self.seen |= {(process.pid, process.started): process for process in found}
        return found

    def ended(self) -> list[Process]:
        """Returns the processes that have ended."""
        alive = {(process.pid, process.started) for process in self.alive()}
        return [process for key, process in self.seen.items() if key not in alive]

    @contextmanager
    def frozen(self) -> Iterator[list[Process]]:
        """Stops all processes during the block, so that memory does not change, and resumes them afterwards.

        Raises:
            TimeoutError: a process did not stop.
        """
        stopped: dict[int, Process] = {}
        try:
            give_up_s = time.monotonic() + FREEZE_TIMEOUT_S
            while True:
                running = [process for process in self.alive() if _state(process.pid) not in _STOPPED]
                for process in running:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGSTOP)
                        stopped[process.pid] = process
                if not running:
                    break
                if time.monotonic() > give_up_s:
                    raise TimeoutError("a process of the node does not stop")
                time.sleep(0.001)
            self._is_frozen = True  # who is stopped starts nobody
            yield [process for process in self.alive() if _state(process.pid) not in "ZX"]
        finally:
            self._is_frozen = False
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            if not self._is_frozen:
                self.alive()


def _everybody() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):
                head, _, rest = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
                fields = rest.split()
                yield Process(int(entry), int(fields[1]), int(fields[19]), head.partition("(")[2], "")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _is_among(pid: int, started: int, everybody: list[Process]) -> bool:
    return any(process.pid == pid and process.started == started for process in everybody)


# A process's mappings and resident pages. Linux only; reads /proc/PID/maps, pagemap and mem.
#
# A page that was never touched is neither present nor swapped, and is empty. Unmodified pages of a file are shared by all
# mappings, and are read once. (Documentation/admin-guide/mm/pagemap.rst: bit 63 present, 62 swapped, 61 of a file or shared.)


PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_KERNELS: Final = frozenset({"[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]"})
"""Pages of the kernel that are identical in every process."""
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/PID/maps.

    Attributes:
        rights: such as "rw-p".
        offset: of the first page in the file.
        file: (device, inode) of the mapped file, or None for anonymous memory.
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
        """Description for operators, without addresses, which differ in every run."""
        return f"{self.name or 'anonymous'} ({self.rights})"


def read_maps(pid: int) -> list[Mapping]:
    """Returns the mappings of a process, without the kernel's own.

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
    """The non-empty pages of one mapping.

    Attributes:
        present: [num_pages] bool: in memory or in swap.
        of_file: [num_pages] bool: unmodified pages of a file, or shared memory.
        num_swapped: number of pages in swap.
    """

    present: npt.NDArray[np.bool_]
    of_file: npt.NDArray[np.bool_]
    num_swapped: int


def read_pages(pagemap: int, mapping: Mapping) -> ResidentPages:
    """Returns the pages of a mapping.

    Args:
        pagemap: descriptor of the open /proc/PID/pagemap.

    Raises:
        OSError: the kernel provides no data about them.
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
