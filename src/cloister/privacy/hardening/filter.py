"""What a filter refuses, as data: a system call, on which arguments, with which error. Pure.

The list names what is refused; the rest goes on. A list of what is allowed would be stricter, and would fail requests whenever
a new C library or driver makes a call that none made before.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cloister.privacy.hardening.measure import Needs

AF_UNIX: Final = 1
AF_INET: Final = 2
AF_INET6: Final = 10
SOCK_STREAM: Final = 1
SOCK_KIND: Final = 0xF
MSG_FASTOPEN: Final = 0x20000000
CLONE_THREAD: Final = 0x00010000
CLONE_NAMESPACES: Final = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
PROT_EXEC: Final = 0x4
RLIMIT_CORE: Final = 4
PR_SET_DUMPABLE: Final = 4
PR_SET_MM: Final = 35
PR_SET_PTRACER: Final = 0x59616D61
TIOCSTI: Final = 0x5412
TIOCLINUX: Final = 0x541C
O_WRITING: Final = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC

ALWAYS: Final = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd"),
    *("execve", "execveat", "uselib"),
    *("perf_event_open", "bpf", "userfaultfd", "memfd_secret", "lookup_dcookie"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("kexec_load", "kexec_file_load", "create_module", "init_module", "finit_module", "delete_module", "reboot"),
    *("keyctl", "add_key", "request_key"),
    *("mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "unshare", "setns", "swapon", "swapoff", "quotactl", "quotactl_fd", "acct"),
    *("name_to_handle_at", "open_by_handle_at", "fanotify_init", "fanotify_mark"),
    *("syslog", "iopl", "ioperm", "modify_ldt", "personality", "settimeofday", "clock_settime", "remap_file_pages"),
    *("shmget", "shmat", "semget", "msgget"),
)
"""Refused in every process of a sealed node, whatever the arguments."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A test of one argument: (its low, or high, 32 bits & mask) is `value`, or is not."""

    argument: int
    value: int
    equal: bool = True
    mask: int = 0xFFFFFFFF
    high: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A system call that is refused if all conditions hold."""

    name: str
    conditions: tuple[Condition, ...] = ()
    error: int = errno.EPERM


def rules(needs: Needs) -> Iterator[Rule]:
    """Yields what a process may not do from its start on."""
    yield from (Rule(name) for name in ALWAYS)
    # C libraries go back to clone(2), whose flags a filter can see; those of clone3 lie behind a pointer
    yield Rule("clone3", error=errno.ENOSYS)
    yield Rule("clone", (_any_of(0, CLONE_NAMESPACES),))
    if not needs.fork:
        yield from (Rule("fork"), Rule("vfork"), Rule("clone", (Condition(0, 0, mask=CLONE_THREAD),)))
    yield Rule("prctl", (Condition(0, PR_SET_DUMPABLE), Condition(1, 1)))
    yield Rule("prctl", (Condition(0, PR_SET_PTRACER),))
    yield Rule("prctl", (Condition(0, PR_SET_MM),))
    yield Rule("setrlimit", (Condition(0, RLIMIT_CORE),))
    for high in (False, True):  # a limit is given, so that it is set and not only read
        yield Rule("prlimit64", (Condition(1, RLIMIT_CORE), Condition(2, 0, equal=False, high=high)))
    yield from (Rule("ioctl", (Condition(1, request),)) for request in (TIOCSTI, TIOCLINUX))
    yield from _network_rules(needs)


def closing_rules(needs: Needs) -> Iterator[Rule]:
    """Yields what a process may not do once everything is loaded and before the first request.

    No page becomes executable any more, so that no library, extension module or generated code comes in; no file is opened for
    writing but where `needs.write` says so (Landlock knows where); no socket is made.
    """
    yield Rule("mmap", (_any_of(2, PROT_EXEC),))
    yield Rule("mprotect", (_any_of(2, PROT_EXEC),))
    yield Rule("pkey_mprotect", (_any_of(2, PROT_EXEC),))
    if not needs.connect:
        yield Rule("socket")
    yield Rule("bind")
    if not needs.write:
        yield from closing_file_rules()


def closing_file_rules() -> Iterator[Rule]:
    """Yields the rules by which no file is opened for writing."""
    yield Rule("creat")
    yield Rule("openat2", error=errno.ENOSYS)  # its flags lie behind a pointer; nothing here calls it
    yield Rule("open", (_any_of(1, O_WRITING),))
    yield Rule("openat", (_any_of(2, O_WRITING),))


def _network_rules(needs: Needs) -> Iterator[Rule]:
    """A filter sees no address. So a process that calls nobody cannot call at all; datagrams (DNS too) are refused to all."""
    if not needs.connect:
        yield Rule("connect")
        # TCP fast open connects as it sends
        for name, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
            yield Rule(name, (_any_of(flags, MSG_FASTOPEN),))
    if not needs.listen and not needs.connect:
        yield Rule("socket")
        yield from (Rule(name) for name in ("bind", "listen"))
        return
    families = (AF_UNIX, AF_INET, AF_INET6)
    yield Rule("socket", tuple(Condition(0, family, equal=False) for family in families))
    yield Rule("socket", (Condition(1, SOCK_STREAM, equal=False, mask=SOCK_KIND),))


def _any_of(argument: int, bits: int) -> Condition:
    return Condition(argument, 0, equal=False, mask=bits)
