"""KV that each sequence sees at consecutive addresses, in pages that are mapped as its blocks are allocated.

This is vAttention (Prabhu et al. 2025) on a CPU. Addresses are reserved at full length for every sequence that may run, and
take no memory. Blocks are pieces of one file without a name (memfd), so a block may be mapped at several places: two sequences
that share a prefix have ranges over the same pages. A block has the KV of all layers, so one mapping serves them all (their
"tensor slicing"). The scheduler and its pool know nothing of it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cloister.backends.spec import AttentionSpec, DecoderSpec
from cloister.types.errors import EngineError

ByteArray = npt.NDArray[np.uint8]
_MAP_FIXED: Final = 0x10  # Linux, x86-64 and aarch64; Python's mmap has no mapping at a given address
_MAP_NORESERVE: Final = 0x4000
_RESERVED: Final = (0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)  # no access: a stray pointer ends the process


@dataclass(frozen=True, slots=True)
class RangeLayout:
    """Address ranges for sequences.

    Attributes:
        num_ranges: sequences that run at once.
        num_entries: blocks of the longest of them.
    """

    num_ranges: int
    num_entries: int

    @property
    def most_mappings(self) -> int:
        """Mappings if no block of a sequence lies behind the one before it: the system keeps neighbours as one."""
        return self.num_ranges * (self.num_entries + 1) + 2


def has_plain_kv(spec: DecoderSpec) -> bool:
    """Whether every layer keeps keys and values of every head: no states, and no latents."""
    return all(isinstance(layer.attention, AttentionSpec) and layer.state is None for layer in spec.layers)


def pad_block(block_bytes: int) -> int:
    """Returns the bytes of a block of whole pages, the least that can be mapped."""
    return -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def pad_position(position_bytes: int, block_size: int) -> int:
    """Returns the bytes of a position with which blocks are whole pages without a gap behind their last position."""
    unit = mmap.PAGESIZE // math.gcd(block_size, mmap.PAGESIZE)
    return -(-position_bytes // unit) * unit


class KVRanges:
    """Memory of blocks, at addresses by their numbers and at those of the sequences that have them.

    Blocks are numbered through all addresses: first `num_blocks` blocks of memory, then the ranges of sequences, slot after
    slot. So a block of memory has a number for wiping, copying and sending it, and another one in each range. The block behind
    the last is never mapped, and reads as zeros.

    Args:
        num_blocks: of memory.
        stride: bytes of a block, whole pages.

    Attributes:
        num_addresses: blocks of all addresses.
        memory: [num_addresses + 1, stride]; only what is mapped can be touched.

    Raises:
        MemoryError: the system refuses the memory or the addresses.
    """

    def __init__(self, layout: RangeLayout, num_blocks: int, stride: int) -> None:
        self.num_blocks, self.stride = num_blocks, stride
        self._layout = layout
        self.num_addresses = num_blocks + layout.num_ranges * layout.num_entries
        self._tables: dict[int, array[int]] = {}  # by slot, the blocks that are mapped
        num_bytes = (self.num_addresses + 1) * stride
        try:
            self._addresses = _Addresses(num_bytes)
            self._open()
        except OSError as error:
            sizes = f"{num_blocks * stride >> 20} MiB of KV in {num_bytes >> 20} MiB of addresses"
            raise MemoryError(f"the system refuses {sizes}: {error.strerror}") from None
        self.memory: ByteArray = np.asarray(self._addresses).reshape(-1, stride)
        _ranges.add(self)

    @property
    def num_mappings(self) -> int:
        """Mappings in the ranges of sequences: blocks that are neighbours in memory too are one."""
        return sum(sum(1 for _ in _runs(table, 0)) for table in self._tables.values())

    def describe(self) -> str:
        """Returns the sizes of memory and addresses, for operators."""
        mib = self.num_blocks * self.stride >> 20
        return f"{mib} MiB of memory in blocks of {self.stride >> 10} KiB, {self._addresses.num_bytes >> 20} MiB reserved"

    def first_block(self, slot: int) -> int:
        """Returns the number of the first block of a slot's range."""
        return self.num_blocks + slot * self._layout.num_entries

    def map(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Has entry i of a slot's range be block blocks[i], for i >= first; entries before it are as they were.

        Raises:
            EngineError: there is no such range, or the system refuses; nothing of the slot is mapped then.
        """
        if not 0 <= slot < self._layout.num_ranges or len(blocks) > self._layout.num_entries:
            raise EngineError("a sequence is longer, or one more, than KV has address ranges for; restart without --kv-layout")
        table, start = self._tables.setdefault(slot, array("i")), self.first_block(slot)
        num_held = len(table)
        try:
            for entry, length in _runs(blocks, first):
                self._map_memory(start + entry, blocks[entry], length)
            if num_held > len(blocks):
                self._unmap(start + len(blocks), num_held - len(blocks))
        except OSError as error:
            table.extend([-1] * (len(blocks) - num_held))  # any of these may be mapped
            self.release(slot)
            raise EngineError(
                f"the system refuses to map the KV of this sequence ({error.strerror}); try again, or have the operator raise "
                "vm.max_map_count or leave --kv-layout out"
            ) from None
        table[first:] = array("i", blocks[first:])

    def release(self, slot: int) -> None:
        """Unmaps a slot's range; its addresses stay reserved."""
        table = self._tables.get(slot)
        if table:
            with suppress(OSError):  # as many mappings as may be, of others: the next sequence of the slot maps over them
                self._unmap(self.first_block(slot), len(table))
                del self._tables[slot]

    def _open(self) -> None:
        """Takes memory, all zeros, and maps it at the first addresses; no range has a block."""
        self._tables.clear()
        self._addresses.map(0, self._addresses.num_bytes, *_RESERVED)
        self._file = _File(self.num_blocks * self.stride)
        self._map_memory(0, 0, self.num_blocks)
        self._addresses.map(
            self.num_addresses * self.stride, self.stride, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )

    def _map_memory(self, target: int, block: int, length: int) -> None:
        at, num_bytes, offset = target * self.stride, length * self.stride, block * self.stride
        self._addresses.map(at, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._file.descriptor, offset)

    def _unmap(self, block: int, length: int) -> None:
        self._addresses.map(block * self.stride, length * self.stride, *_RESERVED)


def _runs(blocks: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Yields (entry, length) of the longest runs of consecutive numbers from an entry on."""
    start = first
    for entry in range(first + 1, len(blocks) + 1):
        if entry == len(blocks) or blocks[entry] != blocks[entry - 1] + 1:
            yield start, entry - start
            start = entry


class _File:
    """Memory without a name, closed with its object; mappings of it live on."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("kv")
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        os.ftruncate(self.descriptor, num_bytes)


class _Addresses:
    """Reserved addresses; numpy keeps the object alive as long as it has an array there."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._start = _map(None, num_bytes, *_RESERVED)
        weakref.finalize(self, _libc.munmap, self._start, num_bytes).atexit = False  # threads may still compute

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._start, False), "shape": (self.num_bytes,), "typestr": "|u1", "version": 3}

    def map(self, at: int, num_bytes: int, rights: int, flags: int, descriptor: int = -1, offset: int = 0) -> None:
        """Maps something over a part of the addresses.

        Raises:
            OSError: the system refuses.
        """
        _map(self._start + at, num_bytes, rights, flags | _MAP_FIXED, descriptor, offset)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED: Final = ctypes.c_void_p(-1).value


def _map(at: int | None, num_bytes: int, rights: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    """mmap(2). Raises OSError."""
    address: int | None = _libc.mmap(at, num_bytes, rights, flags, descriptor, offset)
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


_ranges: weakref.WeakSet[KVRanges] = weakref.WeakSet()


def _reopen() -> None:
    """Gives a fork memory of its own: it would share this one, as its other pages are copied and this file's are not."""
    for ranges in _ranges:
        with suppress(OSError):  # what it then touches ends it
            ranges._open()


os.register_at_fork(after_in_child=_reopen)
