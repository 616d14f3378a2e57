"""Measures `core-limit` and `dumpable`: no image of this process is written, and nobody without SYS_PTRACE looks into it.

A process that is not dumpable has its /proc files owned by root and guarded: reading its memory, maps, environment and files,
attaching to it and taking its descriptors all need CAP_SYS_PTRACE, whoever asks (ptrace(2), PR_SET_DUMPABLE).
"""

from __future__ import annotations

import resource

from cloister.privacy.hardening import kernel
from cloister.privacy.hardening.measure import Missing, Needs


class CoreLimit:
    name = "core-limit"
    stops = "core files"

    def apply(self, needs: Needs) -> str:
        if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):  # once it is, the filter refuses to set it at all
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
            raise Missing("the limit of core files is not 0", "start with `ulimit -c 0`")
        return f"0 bytes; core_pattern {self._pattern()}"

    def probe(self) -> str:
        return f"can be 0; core_pattern {self._pattern()}"

    def _pattern(self) -> str:
        """A pattern that is a pipe takes no notice of the limit, so that `dumpable` has to stop it."""
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
        """What else stands before ptrace: with 3 nobody attaches to anything, SYS_PTRACE or not."""
        scope = kernel.read_text("/proc/sys/kernel/yama/ptrace_scope")
        return "no Yama in this kernel" if scope is None else f"Yama's ptrace_scope is {scope.strip()}"
