"""The folder of a Ray that a front started. Processes of Ray outlive their head and their raylet for some seconds, and make
folders anew that were removed; so they are ended first."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Final

REMOVE_S: Final = 10.0
"""Longest wait until what writes to a folder has ended."""
_POLL_S: Final = 0.05


def make_folder() -> str:
    """Makes a folder of mode 0700; paths of Ray's sockets there must be short."""
    return tempfile.mkdtemp(prefix="cl-ray-", dir="/tmp")


def remove_folder(folder: str) -> None:
    """Kills what has a file below a folder open for writing, but this process, and removes the folder. Blocks."""
    give_up_s = time.monotonic() + REMOVE_S
    while True:
        writers = list(_find_writers(folder))
        for pid in writers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not (writers or os.path.exists(folder)) or time.monotonic() >= give_up_s:
            return
        time.sleep(_POLL_S)


def _find_writers(folder: str) -> Iterator[int]:
    """Yields the processes that have a file below a folder open for writing (Linux, proc(5)); who reads a log is none."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()] if os.path.isdir("/proc/self/fd") else []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if pid != os.getpid() and any(_writes(pid, number, folder) for number in os.listdir(f"/proc/{pid}/fd")):
                yield pid


def _writes(pid: int, number: str, folder: str) -> bool:
    try:
        if not os.readlink(f"/proc/{pid}/fd/{number}").startswith(f"{folder}/"):
            return False
        with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
            flags = next(line for line in file if line.startswith("flags:"))
    except OSError:  # it was closed meanwhile
        return False
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
