"""The n-grams of one sequence by their first token, the latest first, in constant memory (Fu et al. 2024, section 3.2)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from cloister.executor.drafters.residue import overwrite

NUM_FOLLOWING: Final = 4
"""Tokens of an n-gram behind its first one."""
NUM_KEPT: Final = 4
"""N-grams for one first token."""
NUM_SLOTS: Final = 2048
_STRIDE: Final = NUM_KEPT * NUM_FOLLOWING
NUM_BYTES: Final = NUM_SLOTS * (_STRIDE + 2) * 4


class NgramPool:
    """N-grams lie in the slot that the lower bits of their first token name; a newer token takes the slot of an older one."""

    __slots__ = ("_counts", "_following", "_owners")

    def __init__(self) -> None:
        self._owners = array("i", bytes(4 * NUM_SLOTS))
        self._counts = array("i", bytes(4 * NUM_SLOTS))
        self._following = array("i", bytes(4 * NUM_SLOTS * _STRIDE))

    def put(self, first: int, following: Sequence[int]) -> None:
        """Takes in an n-gram: a token, and the `NUM_FOLLOWING` behind it. One that is there already becomes the latest."""
        slot = first % NUM_SLOTS
        if self._owners[slot] != first:
            self._owners[slot], self._counts[slot] = first, 0
        start, count = slot * _STRIDE, self._counts[slot]
        kept = self._following[start : start + count * NUM_FOLLOWING]
        newest = array("i", following)
        for place in range(0, len(kept), NUM_FOLLOWING):
            if kept[place : place + NUM_FOLLOWING] == newest:
                del kept[place : place + NUM_FOLLOWING]
                break
        merged = (newest + kept)[:_STRIDE]
        self._following[start : start + len(merged)] = merged
        self._counts[slot] = len(merged) // NUM_FOLLOWING

    def find(self, first: int) -> list[list[int]]:
        """Returns what followed a token, [up to NUM_KEPT][NUM_FOLLOWING], the latest first."""
        slot = first % NUM_SLOTS
        if self._owners[slot] != first:
            return []
        start = slot * _STRIDE
        ends = range(start, start + self._counts[slot] * NUM_FOLLOWING, NUM_FOLLOWING)
        return [self._following[end : end + NUM_FOLLOWING].tolist() for end in ends]

    def copy(self) -> NgramPool:
        """Returns one that goes its own way."""
        twin = NgramPool()
        twin._owners, twin._counts, twin._following = self._owners[:], self._counts[:], self._following[:]
        return twin

    def wipe(self) -> None:
        """Overwrites what is kept."""
        for values in (self._owners, self._counts, self._following):
            overwrite(values)
