"""The system calls that hardening makes, by ctypes: the C library has names for few of them. Linux only.

Imports nothing but the standard library, as every module here that runs before libraries load.
"""

from __future__ import annotations

import ctypes
import os
import platform
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
        OSError: what the kernel answered.
    """
    converted = [_convert(argument) for argument in arguments]
    _libc.syscall.restype = ctypes.c_long
    result = int(_libc.syscall(ctypes.c_long(number), *converted))
    if result < 0:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))
    return result


def prctl(option: int, *arguments: int) -> int:
    """prctl(2), with zeros for what is not given.

    Raises:
        OSError: what the kernel answered.
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
        OSError: what the kernel answered.
    """
    if _libc.mlockall(ctypes.c_int(flags)) != 0:
        number_of_error = ctypes.get_errno()
        raise OSError(number_of_error, os.strerror(number_of_error))


def machine() -> str:
    """The instruction set of this process: x86_64, aarch64 or what uname(2) says."""
    return platform.machine()


def read_text(path: str) -> str | None:
    """Returns what a small file of the kernel says; None if it is not there or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _convert(argument: object) -> object:
    if isinstance(argument, int):
        return ctypes.c_long(argument)
    return ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else argument
