"""System calls and their numbers for hardening, by ctypes: libc wraps few of them. Linux only.

Imports only the standard library, like every module here that runs before libraries load.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_GET_DUMPABLE: Final = 3
PR_SET_DUMPABLE: Final = 4
PR_CAPBSET_READ: Final = 23
PR_CAPBSET_DROP: Final = 24
PR_SET_NO_NEW_PRIVS: Final = 38
PR_GET_NO_NEW_PRIVS: Final = 39
PR_CAP_AMBIENT: Final = 47
PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_libc: Final = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | ctypes.Structure | None) -> int:
    """Makes a system call by its number. Integers go as 64 bits, structures and buffers by their address.

    Raises:
        OSError: the kernel's error.
    """
    converted = [_convert(argument) for argument in arguments]
    _libc.syscall.restype = ctypes.c_long
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return result


def prctl(option: int, *arguments: int) -> int:
    """prctl(2), with zeros for omitted arguments.

    Raises:
        OSError: the kernel's error.
    """
    given = [*arguments, 0, 0, 0, 0][:4]
    result = int(_libc.prctl(ctypes.c_int(option), *(ctypes.c_ulong(argument) for argument in given)))
    if result < 0:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return result


def mlockall(flags: int) -> None:
    """mlockall(2).

    Raises:
        OSError: the kernel's error.
    """
    if _libc.mlockall(ctypes.c_int(flags)) != 0:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))


def machine() -> str:
    """The instruction set of this process: x86_64, aarch64 or what uname(2) says."""
    return platform.machine()


def read_text(path: str) -> str | None:
    """Returns the content of a small kernel file; None if it is missing or unreadable."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _convert(argument: object) -> object:
    if isinstance(argument, int):
        return ctypes.c_long(argument)
    return ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument


# Numbers of the system calls in filters, and the kernel interface they depend on. Pure data.
#
# Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux. Calls that an instruction set
# lacks are omitted from its table. `tests/trust/hardening` compares the tables with the headers of the machine.


_X86_64: Final = {
    "open": 2,
    "mmap": 9,
    "mprotect": 10,
    "ioctl": 16,
    "shmget": 29,
    "shmat": 30,
    "socket": 41,
    "connect": 42,
    "sendto": 44,
    "sendmsg": 46,
    "bind": 49,
    "listen": 50,
    "clone": 56,
    "fork": 57,
    "vfork": 58,
    "execve": 59,
    "kill": 62,
    "semget": 64,
    "msgget": 68,
    "creat": 85,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "ptrace": 101,
    "syslog": 103,
    "capset": 126,
    "rt_sigqueueinfo": 129,
    "uselib": 134,
    "personality": 135,
    "setpriority": 141,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "modify_ldt": 154,
    "pivot_root": 155,
    "prctl": 157,
    "setrlimit": 160,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "tkill": 200,
    "sched_setaffinity": 203,
    "lookup_dcookie": 212,
    "remap_file_pages": 216,
    "clock_settime": 227,
    "tgkill": 234,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "ioprio_set": 251,
    "openat": 257,
    "fchownat": 260,
    "fchmodat": 268,
    "unshare": 272,
    "rt_tgsigqueueinfo": 297,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "fanotify_mark": 301,
    "prlimit64": 302,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "sendmmsg": 307,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "sched_setattr": 314,
    "seccomp": 317,
    "kexec_file_load": 320,
    "bpf": 321,
    "execveat": 322,
    "userfaultfd": 323,
    "pkey_mprotect": 329,
}
_AARCH64: Final = {
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "removexattr": 14,
    "lremovexattr": 15,
    "fremovexattr": 16,
    "ioctl": 29,
    "ioprio_set": 30,
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "chroot": 51,
    "fchmod": 52,
    "fchmodat": 53,
    "fchownat": 54,
    "fchown": 55,
    "openat": 56,
    "quotactl": 60,
    "acct": 89,
    "capset": 91,
    "personality": 92,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "delete_module": 106,
    "clock_settime": 112,
    "syslog": 116,
    "ptrace": 117,
    "sched_setparam": 118,
    "sched_setscheduler": 119,
    "sched_setaffinity": 122,
    "kill": 129,
    "tkill": 130,
    "tgkill": 131,
    "rt_sigqueueinfo": 138,
    "setpriority": 140,
    "reboot": 142,
    "setrlimit": 164,
    "prctl": 167,
    "settimeofday": 170,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "shmat": 196,
    "socket": 198,
    "bind": 200,
    "listen": 201,
    "connect": 203,
    "sendto": 206,
    "sendmsg": 211,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "clone": 220,
    "execve": 221,
    "mmap": 222,
    "swapon": 224,
    "swapoff": 225,
    "mprotect": 226,
    "remap_file_pages": 234,
    "rt_tgsigqueueinfo": 240,
    "perf_event_open": 241,
    "prlimit64": 261,
    "fanotify_init": 262,
    "fanotify_mark": 263,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "setns": 268,
    "sendmmsg": 269,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "sched_setattr": 274,
    "seccomp": 277,
    "bpf": 280,
    "execveat": 281,
    "userfaultfd": 282,
    "pkey_mprotect": 288,
    "kexec_file_load": 294,
}
_BOTH: Final = {  # since Linux 5.1 a new call has one number everywhere
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "openat2": 437,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
}


@dataclass(frozen=True, slots=True)
class Interface:
    """The system call interface of one instruction set.

    Attributes:
        audit: its AUDIT_ARCH number (include/uapi/linux/audit.h), which the kernel shows to filters.
        numbers: name -> number.
        foreign_from: numbers from here on belong to another interface of the same processor (x32); None if there is none.
    """

    audit: int
    numbers: Mapping[str, int]
    foreign_from: int | None = None


INTERFACES: Final[Mapping[str, Interface]] = {
    "x86_64": Interface(0xC000003E, {**_X86_64, **_BOTH}, foreign_from=0x40000000),
    "aarch64": Interface(0xC00000B7, {**_AARCH64, **_BOTH}),
}
