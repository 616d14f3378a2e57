"""Measures `core-limit`, `dumpable` and `swap`: no core dumps, no ptrace without SYS_PTRACE, no pages on disk.

The /proc files of a non-dumpable process are owned by root and protected: reading its memory, maps, environment and files,
attaching to it and copying its descriptors require CAP_SYS_PTRACE for every user (ptrace(2), PR_SET_DUMPABLE).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cloister.trust.hardening import kernel
from cloister.trust.hardening.measure import Missing, Needs


class CoreLimit:
    name = "core-limit"
    stops = "core files"

    def apply(self, needs: Needs) -> str:
        if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):  # once set, the filter refuses to set it again
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
            raise Missing("the limit of core files is not 0", "start with `ulimit -c 0`")
        return f"0 bytes; core_pattern {self._pattern()}"

    def probe(self) -> str:
        return f"can be 0; core_pattern {self._pattern()}"

    def _pattern(self) -> str:
        """A piped core_pattern ignores the limit, so `dumpable` must prevent the dump."""
        pattern = (kernel.read_text("/proc/sys/kernel/core_pattern") or "unknown").strip()
        return "is a pipe" if pattern.startswith("|") else "is a file"


class Dumpable:
    name = "dumpable"
    stops = "ptrace, /proc/PID/mem and its like, process_vm_readv, pidfd_getfd, core dumps"

    def apply(self, needs: Needs) -> str:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if kernel.prctl(kernel.PR_GET_DUMPABLE) != 0:
            raise Missing("the kernel keeps the process dumpable", "run on Linux")
        if "TracerPid:\t0\n" not in (kernel.read_text("/proc/self/status") or ""):  # who attached before this stays
            raise Missing("it is traced by another process, or the kernel does not say", "start the node without a debugger")
        return f"0; {self._yama()}"

    def probe(self) -> str:
        return f"can be 0; {self._yama()}"

    def _yama(self) -> str:
        """Further restriction of ptrace: with 3 no process can attach, even with SYS_PTRACE."""
        scope = kernel.read_text("/proc/sys/kernel/yama/ptrace_scope")
        return "no Yama in this kernel" if scope is None else f"Yama's ptrace_scope is {scope.strip()}"


# Measure `swap`: no page of this process is written to a disk.
#
# Either the machine has no swap, or the cgroup may use none of it (cgroup v2, memory.swap.max), or everything is locked in
# memory. The limits of cgroup v1 do not prevent swapping when the whole machine is short of memory, so they do not count.


MCL_CURRENT: Final = 1
MCL_FUTURE: Final = 2
MCL_ONFAULT: Final = 4
REMEDY: Final = (
    "turn swap off (swapoff -a), or give the cgroup none (memory.swap.max = 0 on cgroup v2; Docker: --memory and "
    "--memory-swap of the same size), or let it lock its memory (Docker: --ulimit memlock=-1 --cap-add IPC_LOCK)"
)


class Swap:
    name = "swap"
    stops = "pages on a disk"

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def apply(self, needs: Needs) -> str:
        without_locking = self._find()
        if without_locking is not None:
            return without_locking
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            _lock()
        except (OSError, ValueError):
            raise Missing("this machine can swap, and memory cannot be locked", REMEDY) from None
        os.register_at_fork(after_in_child=_lock_again)
        return "the machine can swap; all memory is locked"

    def probe(self) -> str:
        found = self._find()
        if found is not None:
            return found
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        if limit == resource.RLIM_INFINITY:
            return "the machine can swap; memory can be locked"
        raise Missing("this machine can swap, and the limit of locked memory is not unlimited", REMEDY)

    def _find(self) -> str | None:
        """Returns why nothing can be swapped; None if it can."""
        swaps = (kernel.read_text(str(self._root / "proc/swaps")) or "unknown\nunknown").splitlines()[1:]
        if not swaps:
            return "the machine has none"
        if any((kernel.read_text(str(group / "memory.swap.max")) or "").strip() == "0" for group in self._groups()):
            return "the cgroup may use none"
        return None

    def _groups(self) -> Iterator[Path]:
        """Every directory of cgroup v2 whose limits apply to this process: its own and all ancestors."""
        mount = self._root / "sys/fs/cgroup"
        for line in (kernel.read_text(str(self._root / "proc/self/cgroup")) or "").splitlines():
            if not line.startswith("0::"):
                continue
            group = mount / line[3:].strip("/")
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(mount)))


def _lock() -> None:
    kernel.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT)


def _lock_again() -> None:
    """Forked processes do not inherit the lock (mlockall(2)); one that cannot lock its memory must exit."""
    try:
        _lock()
    except OSError:
        os.write(2, b"a forked process cannot lock its memory, and ends\n")
        os._exit(1)
