"""What a tree of processes takes of the machine, and what everything else takes. Linux, standard library only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_EVERY_S: Final = 0.1
NO_SESSION: Final = -1
IDLE_CORES: Final = 0.1
"""Other processes may take this much before a run counts as disturbed."""


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One line of /proc/PID/stat (proc_pid_stat(5)): who it belongs to, and CPU time with that of children it waited for."""

    pid: int
    parent: int
    session: int
    cpu_s: float
    rss_bytes: int


def iter_processes() -> Iterator[ProcessStat]:
    """Yields every process that can be read and has not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # the name in brackets may hold anything, brackets too
                rest = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if rest[0] == "Z":
                continue
            times = sum(map(int, rest[11:15])) * _TICK_S
            yield ProcessStat(int(entry.name), int(rest[1]), int(rest[3]), times, int(rest[21]) * _PAGE_BYTES)


def list_session(session: int) -> list[ProcessStat]:
    """Returns the processes of a session, that is, those that a worker and its children started."""
    return [process for process in iter_processes() if process.session == session]


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far: of the machine, and of one session."""

    wall_s: float
    machine_s: float
    own_s: float

    @classmethod
    def read(cls, session: int) -> Usage:
        """Reads it now; stolen time and waiting for disks do not count."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
        user, nice, system, _, _, irq, softirq = ticks
        own_s = sum(process.cpu_s for process in list_session(session))
        return cls(time.monotonic(), (user + nice + system + irq + softirq) * _TICK_S, own_s)

    def other_cores_since(self, before: Usage) -> float:
        """Cores that everything outside the session kept busy since `before`, on average."""
        others_s = (self.machine_s - before.machine_s) - (self.own_s - before.own_s)
        return max(0.0, others_s) / max(self.wall_s - before.wall_s, 1e-3)


def await_idle(session: int, patience_s: float) -> None:
    """Waits until others leave the machine alone, `patience_s` at most."""
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s:
        before = Usage.read(session)
        time.sleep(1.0)
        if Usage.read(session).other_cores_since(before) <= IDLE_CORES:
            return


class PeakMemory:
    """Watches the resident memory of a session; mapped files count, as they do in what the kernel reports."""

    def __init__(self, session: int) -> None:
        self._session = session
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join(5.0)

    @property
    def peak_bytes(self) -> int:
        """The highest sum seen, or the highest that the kernel saw in a single process if that is more."""
        return max([self._peak_bytes, *(_high_water_bytes(process.pid) for process in list_session(self._session))])

    def _watch(self) -> None:
        while not self._stopped.wait(_SAMPLE_EVERY_S):
            self._peak_bytes = max(self._peak_bytes, sum(process.rss_bytes for process in list_session(self._session)))


def _high_water_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
