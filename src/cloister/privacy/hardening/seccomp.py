"""Measure `seccomp`: a filter before every system call of every thread (seccomp(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from typing import Final

from cloister.privacy.hardening import bpf, kernel
from cloister.privacy.hardening.filter import Rule, closing_rules, rules
from cloister.privacy.hardening.measure import Missing, Needs
from cloister.privacy.hardening.syscalls import INTERFACES, Interface

SET_MODE_FILTER: Final = 1
GET_ACTION_AVAIL: Final = 2
FLAG_TSYNC: Final = 1
MODE_FILTER: Final = 2
UNWINDER: Final = "libgcc_s.so.1"
REMEDY: Final = "run on Linux 4.14 or newer with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64"


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class Seccomp:
    name = "seccomp"
    stops = "attaching to others, executing programs, tracing, loading into the kernel, calling out, being dumpable again"

    def apply(self, needs: Needs) -> str:
        return _describe(install(rules(needs)))

    def probe(self) -> str:
        interface = _interface()
        action = ctypes.c_uint32(bpf.KILL_PROCESS)
        try:
            kernel.call(interface.numbers["seccomp"], GET_ACTION_AVAIL, 0, bytes(action))
        except OSError as error:
            raise Missing(f"the kernel has no seccomp filters ({error.strerror})", REMEDY) from None
        return "filters can be set"


class Closing:
    """The second filter, when everything is loaded and before the first request."""

    name = "closed"
    stops = "new executable pages: libraries, extension modules, generated code; new sockets; files opened for writing"

    def apply(self, needs: Needs) -> str:
        with contextlib.suppress(OSError):
            ctypes.CDLL(UNWINDER)  # the C library loads it when the first thread ends or an exception passes through it
        return _describe(install(closing_rules(needs)))

    def probe(self) -> str:
        return Seccomp().probe()


def install(refused: Iterable[Rule]) -> int:
    """Sets a filter in every thread of this process, beside those that are there; returns its number of instructions.

    Raises:
        Missing: the kernel takes none, or a thread runs without it.
    """
    interface = _interface()
    program = bpf.assemble(refused, interface)
    packed = bpf.pack(program)
    try:
        stray = kernel.call(
            interface.numbers["seccomp"], SET_MODE_FILTER, FLAG_TSYNC, _Program(len(program), ctypes.c_char_p(packed))
        )
    except OSError as error:
        raise Missing(f"the kernel took no filter ({error.strerror})", REMEDY) from None
    if stray:
        raise Missing("a thread has a filter of its own and could not be given this one", "start the node by its launcher")
    _check_threads()
    return len(program)


def _check_threads() -> None:
    """Raises Missing if the kernel does not say of every thread that it is filtered."""
    for thread in os.listdir("/proc/self/task"):
        status = kernel.read_text(f"/proc/self/task/{thread}/status")
        if status is not None and f"Seccomp:\t{MODE_FILTER}" not in status:
            raise Missing("a thread runs without the filter", "start the node by its launcher")


def _interface() -> Interface:
    machine = kernel.machine()
    if machine not in INTERFACES:
        raise Missing(f"there is no table of system calls for {machine}", REMEDY)
    return INTERFACES[machine]


def _describe(num_instructions: int) -> str:
    return f"{num_instructions} instructions, on every thread"
