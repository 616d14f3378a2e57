"""Finds thousands of byte patterns in a block of memory in one pass, at about 600 MB/s per core. Pure.

Every needle has an anchor, its first 8 bytes, and a witness, 8 more bytes at a distance. A hash table of anchors leaves few
positions of a block; a hash over anchor and witness leaves almost only true ones, which are compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cloister.trust.residue.needles import RUN, Needle

_BITS: Final = 20  # a table of 1 MiB stays in the cache of a core
_SHIFT: Final = np.uint64(64 - _BITS)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio times 2^64, Knuth's multiplicative hashing
_OTHER: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_WORD: Final = 8

Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Match:
    """A found needle, and its offset in the block."""

    needle: Needle
    at: int


class Finder:
    """Looks for needles.

    Args:
        needles: at least one.

    Attributes:
        reach: length of the longest needle in bytes; consecutive blocks must overlap by as many.
    """

    def __init__(self, needles: Sequence[Needle]) -> None:
        self.needles = tuple(needles)
        self.reach = max(needle.reach for needle in needles)
        self._table = np.zeros(1 << _BITS, bool)
        self._by_distance: dict[int, tuple[_Words, dict[int, list[Needle]]]] = {}
        grouped: dict[int, dict[int, list[Needle]]] = {}
        anchors = np.array([_word(needle.pieces[0][1], 0) for needle in needles], np.uint64)
        self._table[(anchors * _ODD) >> _SHIFT] = True
        for needle, anchor in zip(needles, anchors, strict=True):
            distance, witness = _witness(needle)
            both = int(_join(np.array([anchor], np.uint64), np.array([witness], np.uint64))[0])
            grouped.setdefault(distance, {}).setdefault(both, []).append(needle)
        for distance, by_hash in grouped.items():
            self._by_distance[distance] = (np.array(sorted(by_hash), np.uint64), by_hash)

    def find(self, block: Bytes) -> Iterator[Match]:
        """Yields every complete needle in `block`."""
        size = len(block)
        for offset in range(min(_WORD, size - _WORD + 1)):
            words = np.frombuffer(block, "<u8", (size - offset) // _WORD, offset)
            hashes = words * _ODD
            np.right_shift(hashes, _SHIFT, out=hashes)
            (places,) = np.nonzero(np.take(self._table, hashes.view(np.int64), mode="clip"))
            if len(places):
                yield from self._verify(block, places * _WORD + offset, words[places])

    def _verify(self, block: Bytes, places: npt.NDArray[np.int64], anchors: _Words) -> Iterator[Match]:
        for distance, (known, by_hash) in self._by_distance.items():
            fits = places <= len(block) - distance - _WORD
            starts = places[fits] + distance
            witnesses = block[starts[:, None] + np.arange(_WORD)].view("<u8")[:, 0]
            both = _join(anchors[fits], witnesses)
            nearest = np.minimum(np.searchsorted(known, both), len(known) - 1)
            for index in np.flatnonzero(known[nearest] == both):
                at = int(places[fits][index])
                for needle in by_hash[int(both[index])]:
                    if _lies(needle, block, at):
                        yield Match(needle, at)


def _witness(needle: Needle) -> tuple[int, int]:
    """Returns the distance from the anchor, and the value, of 8 more bytes."""
    if len(needle.pieces) > 1:
        distance, piece = needle.pieces[1]
        return distance, _word(piece, 0)
    return _WORD, _word(needle.pieces[0][1], _WORD)


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + _WORD], "little")


def _join(anchors: _Words, witnesses: _Words) -> _Words:
    mixed: _Words = (anchors * _ODD) ^ ((witnesses * _OTHER) >> np.uint64(7)) ^ (witnesses * _OTHER)
    return mixed


def _lies(needle: Needle, block: Bytes, at: int) -> bool:
    return all(block[at + distance : at + distance + len(piece)].tobytes() == piece for distance, piece in needle.pieces)


# Finds token ids stored as Python integers, through the pointer array of their list or tuple.
#
# First every integer object in memory whose value is an id of a mark is recorded with its address (CPython: reference count,
# type, size, digits), then every four pointers in a row to such objects are read as ids and looked up among the marks' runs.

LIST_KIND: Final = "list of python ints"
_ONE_DIGIT: Final = (np.uint64(1), np.uint64(8))
"""CPython's value at byte 16 of an integer below 2^30: its size up to 3.11, a tag from 3.12 on."""
_ADDRESS_BITS: Final = 20
_ADDRESS_SHIFT: Final = np.uint64(64 - _ADDRESS_BITS)
_LARGEST_ID: Final = 1 << 20


class ListFinder:
    """Looks for runs of ids in one process, in two passes over the same blocks.

    Args:
        runs: (owner, ids) of each mark, ids from 257 on: smaller ones are shared objects.
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
        """First pass: records the integers of a block at address `at`, a multiple of 8."""
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
        self._table = np.zeros(1 << _ADDRESS_BITS, bool)
        self._table[(self._sorted * _ODD) >> _ADDRESS_SHIFT] = True

    def find(self, block: Bytes) -> Iterator[tuple[int, int]]:
        """Second pass: yields (offset in the block, owner) of consecutive pointers that form a run."""
        words = np.frombuffer(block, "<u8", len(block) // 8)
        if len(words) < RUN or not len(self._sorted):
            return
        hit = np.take(self._table, ((words * _ODD) >> _ADDRESS_SHIFT).view(np.int64), mode="clip")
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
