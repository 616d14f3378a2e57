"""Memory that the engines of one machine share for KV: the front makes it, and gives each engine a part (decisions/0039).

Only its own engine writes a part, and all engines may read it (`engine.kv_pool_member`). When its engine has ended, in whatever
way, the front wipes the part before another engine gets it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from itertools import count
from typing import Final

import msgspec

from cloister.engine.locked_keys import lock_keys

PAGE_BYTES: Final = mmap.ALLOCATIONGRANULARITY


class PoolSeat(msgspec.Struct, frozen=True):
    """What the front tells an engine about the pool, whose descriptor comes along.

    Attributes:
        secret: key under which announcements are sealed; the engines of the pool have it, and nobody else.
        part: the engine's own part.
        num_parts, part_bytes: of the pool.
        writer: number of the engine, unique during the life of the pool; at least 1.
    """

    secret: bytes
    part: int
    num_parts: int
    part_bytes: int
    writer: int

    def __repr__(self) -> str:
        """Shows no secret."""
        return f"PoolSeat(part={self.part}, writer={self.writer})"


class KVPool:
    """The front's end of the pool. Pages take memory when they are written.

    Args:
        part_bytes: size of a part; it is rounded down to whole pages.
        num_parts: engines that may run at once.

    Raises:
        OSError: there is no such memory.
        ConfigError: none may be locked for its secret.

    Attributes:
        fd: the memory. Its length cannot change, so that a process that maps it cannot die of that.
    """

    def __init__(self, part_bytes: int, num_parts: int) -> None:
        self.part_bytes, self.num_parts = part_bytes // PAGE_BYTES * PAGE_BYTES, num_parts
        self.fd = os.memfd_create("cloister-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.part_bytes * num_parts)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, self.part_bytes * num_parts)
        self._keys = lock_keys()
        self._secret = self._keys.draw()  # new at each start, and never written
        self._lock = threading.Lock()  # parts are wiped in threads
        self._free = list(range(num_parts))
        self._writers = count(1)

    def take_seat(self) -> PoolSeat | None:
        """Returns a seat for an engine; None if all parts are taken."""
        with self._lock:
            if not self._free:
                return None
            secret = self._keys.copy(self._secret)
            assert secret is not None  # it lives as long as the front
            return PoolSeat(secret, self._free.pop(0), self.num_parts, self.part_bytes, next(self._writers))

    def free_seat(self, seat: PoolSeat) -> None:
        """Wipes the part of an engine that has ended: its pages go back to the system, and read as zeros. Takes a tenth of a
        second for each GiB, about."""
        start = seat.part * self.part_bytes
        self._map[start : start + PAGE_BYTES] = bytes(PAGE_BYTES)  # from now on no engine looks there
        self._map.madvise(mmap.MADV_REMOVE, start, self.part_bytes)
        with self._lock:
            self._free = sorted([*self._free, seat.part])
