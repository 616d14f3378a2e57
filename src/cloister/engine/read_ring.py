"""Reads with many parts in flight by one call: io_uring of Linux (5.6 and later), by its system calls alone.

A ring is for one thread. All of its reads have ended when a call returns, so nothing is written to freed memory.
Sandboxes often forbid io_uring, as the kernel's side of it has had many faults; setting it up then raises OSError.
(io_uring_setup(2), io_uring_enter(2); linux/io_uring.h)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import time
import weakref
from typing import Final

_SETUP, _ENTER = 425, 426
_PARAMS: Final = struct.Struct("<10I 20I")
"""struct io_uring_params: ten numbers of its own, then `sq_off` and `cq_off` with ten each."""
_SQ_RING, _SQES = 0, 0x10000000
_FEAT_SINGLE_MMAP, _GET_EVENTS, _OP_READ = 1, 1, 22
_SQE: Final = struct.Struct("<BBHiQQIIQ")
_SQE_BYTES, _CQE_BYTES = 64, 16
_CQE: Final = struct.Struct("<Qi")
_WORD: Final = struct.Struct("<I")

_PASSING: Final = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOMEM)
"""The kernel lacks memory or has too many completions for now, or a signal came."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class ReadRing:
    """A ring for reads of one thread.

    Args:
        num_parts: reads in flight; a power of two.

    Raises:
        OSError: this kernel or sandbox has no io_uring.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        params = ctypes.create_string_buffer(_PARAMS.size)
        self._fd = _call(_SETUP, ctypes.c_uint(num_parts), params)
        os.set_inheritable(self._fd, False)
        weakref.finalize(self, os.close, self._fd)
        numbers = _PARAMS.unpack(params.raw)
        if not numbers[5] & _FEAT_SINGLE_MMAP:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        sq, cq = numbers[10:20], numbers[20:30]
        num_bytes = max(sq[6] + numbers[0] * _WORD.size, cq[5] + numbers[1] * _CQE_BYTES)
        self._rings = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_SQ_RING)
        self._entries = mmap.mmap(self._fd, numbers[0] * _SQE_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=_SQES)
        self._sq_tail, self._sq_array, self._sq_mask = sq[1], sq[6], self._word(sq[2])
        self._cq_head, self._cq_tail, self._cqes, self._cq_mask = cq[0], cq[1], cq[5], self._word(cq[2])

    def read(self, fd: int, buffer: memoryview, place: int, part_bytes: int) -> int:
        """Fills a buffer from a file, in parts that are read at the same time; returns how many bytes came before a gap.

        Args:
            part_bytes: size of each part; there are at most `num_parts`.

        Raises:
            OSError: a part could not be read.
        """
        starts = range(0, len(buffer), part_bytes)
        assert len(starts) <= self.num_parts
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        tail = self._word(self._sq_tail)
        for number, start in enumerate(starts):
            slot = (tail + number) & self._sq_mask
            size = min(part_bytes, len(buffer) - start)
            _SQE.pack_into(
                self._entries, slot * _SQE_BYTES, _OP_READ, 0, 0, fd, place + start, address + start, size, 0, number
            )
            _WORD.pack_into(self._rings, self._sq_array + slot * _WORD.size, slot)
        _WORD.pack_into(self._rings, self._sq_tail, (tail + len(starts)) & 0xFFFFFFFF)
        results = self._wait(len(starts))
        num_read = 0
        for start, result in zip(starts, results, strict=True):
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            if num_read == start:
                num_read += result
        return num_read

    def _wait(self, num_parts: int) -> list[int]:
        """Submits what the ring has, and returns the result of each part once all have one."""
        results: dict[int, int] = {}
        num_left = num_parts
        while num_left or len(results) < num_parts:
            arguments = (num_left, num_parts - len(results), _GET_EVENTS)
            try:
                num_left -= _call(_ENTER, self._fd, *map(ctypes.c_uint, arguments), None, ctypes.c_size_t(0))
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                time.sleep(0.001)  # submitted reads go on, so none may be abandoned
            head, tail = self._word(self._cq_head), self._word(self._cq_tail)
            while head != tail:
                number, result = _CQE.unpack_from(self._rings, self._cqes + (head & self._cq_mask) * _CQE_BYTES)
                results[number] = result
                head = (head + 1) & 0xFFFFFFFF
            _WORD.pack_into(self._rings, self._cq_head, head)
        return [results[number] for number in range(num_parts)]

    def _word(self, at: int) -> int:
        return int(_WORD.unpack_from(self._rings, at)[0])


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
