"""Keys in memory that is never swapped, dumped or inherited: while a key is kept, it is here and nowhere else.

A cipher has a copy of its key, which OpenSSL wipes when the cipher is freed. So ciphers are made when something is sealed or
opened, and dropped afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from itertools import count
from typing import Final, TypeVar

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cloister.types.errors import ConfigError

T = TypeVar("T")

KEY_BYTES: Final = 32
_WIPE_ON_FORK: Final = 18
"""MADV_WIPEONFORK of Linux, which Python's `mmap` does not name."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class LockedKeys:
    """Keys of AES-256-GCM, by numbers that are used once. Any thread may use it.

    Raises:
        OSError: this process may lock no memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._pages: list[memoryview] = []
        self._free: list[memoryview] = []
        self._keys: dict[int, memoryview] = {}
        self._add_page()

    def draw(self) -> int:
        """Draws a key; returns its number.

        Raises:
            OSError: no more memory may be locked, or the system has no random numbers.
        """
        with self._lock:
            key = self._take()
            if _libc.getrandom(_address_of(key), ctypes.c_size_t(KEY_BYTES), 0) != KEY_BYTES:
                self._free.append(key)
                raise OSError(ctypes.get_errno(), "no random numbers")
            return self._keep(key)

    def put(self, key: bytes) -> int:
        """Keeps a key that came from elsewhere; returns its number. Raises OSError as `draw` does."""
        with self._lock:
            kept = self._take()
            kept[:] = key
            return self._keep(kept)

    def cipher(self, number: int) -> AESGCM | None:
        """Returns a cipher for a key, for use at once; None if the key was forgotten."""
        return self.use(number, AESGCM)

    def use(self, number: int, make: Callable[[memoryview], T]) -> T | None:
        """Returns `make(key)`, which copies the key and wipes its copy as a cipher does; None if the key was forgotten."""
        with self._lock:
            key = self._keys.get(number)
            return None if key is None else make(key)

    def copy(self, number: int) -> bytes | None:
        """Returns a key, to be sealed for somebody else; None if it was forgotten."""
        with self._lock:
            key = self._keys.get(number)
            return None if key is None else bytes(key)

    def forget(self, number: int) -> None:
        """Wipes a key."""
        with self._lock:
            key = self._keys.pop(number, None)
            if key is not None:
                key[:] = bytes(KEY_BYTES)
                self._free.append(key)

    def clear(self) -> None:
        """Wipes all keys."""
        for number in list(self._keys):
            self.forget(number)

    def _keep(self, key: memoryview) -> int:
        number = next(self._numbers)
        self._keys[number] = key
        return number

    def _take(self) -> memoryview:
        if not self._free:
            self._add_page()
        return self._free.pop()

    def _add_page(self) -> None:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = memoryview(page)
        if _libc.mlock(_address_of(memory), ctypes.c_size_t(mmap.PAGESIZE)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        for advice in (mmap.MADV_DONTDUMP, _WIPE_ON_FORK):
            with contextlib.suppress(OSError):  # a sandbox may lack it
                page.madvise(advice)
        self._pages.append(memory)
        self._free += [memory[start : start + KEY_BYTES] for start in range(0, mmap.PAGESIZE, KEY_BYTES)]


def lock_keys(setting: str = "kv_tier") -> LockedKeys:
    """Returns memory for keys. Raises ConfigError if none may be locked here.

    Args:
        setting: what needs it.
    """
    try:
        return LockedKeys()
    except OSError as error:
        raise ConfigError(
            f"{setting} keeps its keys in memory that is not swapped, but none may be locked here ({error.strerror}); raise "
            f"the limit (`ulimit -l 64`; in a container `--ulimit memlock=65536`), or leave {setting} out",
            param=setting,
        ) from error


def _address_of(memory: memoryview) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
