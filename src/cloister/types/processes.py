"""Process names as shown by `ps`, parents and threads, and an allocator that overwrites freed memory. Linux only; no effect
elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

THREADS_END_S: Final = 5.0
"""Time in which threads that were told to end do so."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_num_adopting = 0
_LONGEST: Final = 15  # the kernel truncates longer names


def name_process(name: str) -> None:
    """Names this thread, which is the process's name if it is the first one, `cl-NAME`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"cl-{name}".encode()[:_LONGEST])


def end_with_parent(parent: int | None = None) -> None:
    """Has the kernel end this process when its parent dies; ends it now if that happened already.

    Args:
        parent: process id of the parent; None: whichever it is now.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def lower_priority(niceness: int, but: Collection[int | None] = ()) -> None:
    """Adds to the niceness of this process's threads, and of those that they start from now on. Where that is refused or
    unknown, they stay as they are.

    Args:
        but: native ids of threads that stay as they are.
    """
    if sys.platform != "linux":
        return
    threads: list[str] = []
    with contextlib.suppress(OSError):  # there is no /proc
        threads = os.listdir("/proc/self/task")
    for thread_id in map(int, threads):
        if thread_id not in but:
            with contextlib.suppress(OSError):  # a filter of system calls; or the thread has ended
                os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of descendants whose parent dies meanwhile (prctl(2), PR_SET_CHILD_SUBREAPER), and not for
    longer: it waits for no other orphans, which would stay zombies.

    Raises:
        OSError: this system has no such thing.
    """
    global _num_adopting
    if sys.platform != "linux":
        raise OSError("only Linux has it")
    prctl = ctypes.CDLL(None).prctl
    _num_adopting += 1
    try:
        if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("the kernel refuses it")
        yield
    finally:
        _num_adopting -= 1
        prctl(_PR_SET_CHILD_SUBREAPER, int(_num_adopting > 0), 0, 0, 0)


def count_threads() -> int:
    """Counts the threads of this process, native ones included, once those that are about to end have ended."""
    tasks = Path("/proc/self/task")
    give_up_s = time.monotonic() + THREADS_END_S
    while (found := len(os.listdir(tasks)) if tasks.exists() else 1) > 1 and time.monotonic() < give_up_s:
        time.sleep(0.01)
    return found


# Environment variables for an allocator that overwrites freed memory, set before a process starts. Pure data.
#
# glibc fills freed chunks with a byte (`perturb`), but not those in its thread cache, so that is disabled; CPython's own pools
# would keep old content, so every object comes from malloc. Measured in docs/decisions/0009.


OVERWRITING: Final[Mapping[str, str]] = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=85:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}
"""Environment of a process that handles content."""
FORGETFUL_PROFILES: Final = frozenset({"private", "paranoid"})
"""Profiles under which no content of a request may remain in memory after it."""


def overwrites(profile: str | None) -> bool:
    """Whether processes under a profile overwrite freed memory."""
    return profile in FORGETFUL_PROFILES
