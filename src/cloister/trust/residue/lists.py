"""Finds token ids stored as Python integers, through the pointer array of their list or tuple.

First every integer object in memory whose value is an id of a mark is noted with its address (CPython: reference count, type,
size, digits), then every four pointers in a row to such objects are read as ids and looked up among the marks' runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.trust.residue.finder import Bytes
from cloister.trust.residue.needles import RUN

KIND: Final = "list of python ints"
_ONE_DIGIT: Final = (np.uint64(1), np.uint64(8))
"""What CPython keeps at byte 16 of an integer below 2^30: its size up to 3.11, a tag from 3.12 on."""
_BITS: Final = 24
_SHIFT: Final = np.uint64(64 - _BITS)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_ID: Final = 1 << 20

_Words = npt.NDArray[np.uint64]


class ListFinder:
    """Looks for runs of ids in one process, in two passes over the same blocks.

    Args:
        runs: (owner, ids) of each mark, ids from 257 on: smaller ones are objects that everybody shares.
    """

    def __init__(self, runs: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        self._owners: dict[tuple[int, ...], int] = {}
        self._is_marked = np.zeros(_LARGEST_ID, bool)
        for owner, ids in runs:
            self._is_marked[list(ids)] = True
            for start in range(len(ids) - RUN + 1):
                self._owners[ids[start : start + RUN]] = owner
        self._noted: list[tuple[_Words, npt.NDArray[np.int64]]] = []
        self._table = np.zeros(0, bool)
        self._sorted: _Words = np.zeros(0, np.uint64)
        self._ids_sorted: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def note(self, block: Bytes, at: int) -> None:
        """First pass: notes the integers of a block that lies at address `at`, a multiple of 8."""
        words = np.frombuffer(block, "<u8", len(block) // 8)
        if len(words) < 4:
            return
        sizes, digits = words[2:-1], words[3:] & np.uint64(0xFFFFFFFF)
        fits = ((sizes == _ONE_DIGIT[0]) | (sizes == _ONE_DIGIT[1])) & (digits < np.uint64(_LARGEST_ID))
        (places,) = np.nonzero(fits)
        values = digits[places].astype(np.int64)
        chosen = self._is_marked[values]
        self._noted.append(((places[chosen] * 8 + at).astype(np.uint64), values[chosen]))

    def settle(self) -> None:
        """Ends the first pass."""
        addresses = np.concatenate([np.zeros(0, np.uint64), *(addresses for addresses, _ in self._noted)])
        order = np.argsort(addresses)
        self._sorted = addresses[order]
        self._ids_sorted = np.concatenate([np.zeros(0, np.int64), *(ids for _, ids in self._noted)])[order]
        self._table = np.zeros(1 << _BITS, bool)
        self._table[(self._sorted * _ODD) >> _SHIFT] = True

    def find(self, block: Bytes) -> Iterator[tuple[int, int]]:
        """Second pass: yields (place in the block, owner) of pointers in a row that spell a run."""
        words = np.frombuffer(block, "<u8", len(block) // 8)
        if len(words) < RUN or not len(self._sorted):
            return
        hit = np.take(self._table, ((words * _ODD) >> _SHIFT).view(np.int64), mode="clip")
        starts = hit[: -RUN + 1].copy()
        for place in range(1, RUN):
            starts &= hit[place : len(hit) - RUN + 1 + place]
        for start in np.flatnonzero(starts).tolist():
            owner = self._owners.get(tuple(self._spell(words[start : start + RUN])))
            if owner is not None:
                yield start * 8, owner

    def _spell(self, pointers: _Words) -> list[int]:
        places = np.minimum(np.searchsorted(self._sorted, pointers), len(self._sorted) - 1)
        known = self._sorted[places] == pointers
        ids: list[int] = np.where(known, self._ids_sorted[places], -1).tolist()
        return ids
