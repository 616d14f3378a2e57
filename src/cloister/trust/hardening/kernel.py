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
# Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux. None: the instruction set lacks
# the call. `tests/trust/hardening` compares the table with the headers of the machine.


_NUMBERS: Final[Mapping[str, tuple[int, int | None]]] = {  # of x86-64, and of AArch64
    "open": (2, None),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "ioctl": (16, 29),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "socket": (41, 198),
    "connect": (42, 203),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "bind": (49, 200),
    "listen": (50, 201),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "kill": (62, 129),
    "semget": (64, 190),
    "msgget": (68, 186),
    "creat": (85, None),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "capset": (126, 91),
    "rt_sigqueueinfo": (129, 138),
    "uselib": (134, None),
    "personality": (135, 92),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "setrlimit": (160, 164),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "iopl": (172, None),
    "ioperm": (173, None),
    "create_module": (174, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "tkill": (200, 130),
    "sched_setaffinity": (203, 122),
    "lookup_dcookie": (212, None),
    "remap_file_pages": (216, 234),
    "clock_settime": (227, 112),
    "tgkill": (234, 131),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ioprio_set": (251, 30),
    "openat": (257, 56),
    "fchownat": (260, 54),
    "fchmodat": (268, 53),
    "unshare": (272, 97),
    "rt_tgsigqueueinfo": (297, 240),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "prlimit64": (302, 261),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "sendmmsg": (307, 269),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "sched_setattr": (314, 274),
    "seccomp": (317, 277),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "execveat": (322, 281),
    "userfaultfd": (323, 282),
    "pkey_mprotect": (329, 288),
    # since Linux 5.1 a new call has one number everywhere
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "openat2": (437, 437),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
    "fchmodat2": (452, 452),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "open_tree_attr": (467, 467),
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
    "x86_64": Interface(0xC000003E, {name: number for name, (number, _) in _NUMBERS.items()}, foreign_from=0x40000000),
    "aarch64": Interface(0xC00000B7, {name: number for name, (_, number) in _NUMBERS.items() if number is not None}),
}
