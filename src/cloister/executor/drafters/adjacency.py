"""What may follow each token of one sequence: the matrix of Token Recycling (Luo et al. 2024, section 3.1), in constant memory.

A matrix over the vocabulary would be megabytes for each sequence, nearly all of it empty: here a token's row lies in a slot
that its lower bits name, and a newer token takes the slot of an older one.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

WIDTH: Final = 8
"""Tokens that are kept for each token."""
NUM_SLOTS: Final = 4096
NUM_BYTES: Final = NUM_SLOTS * (WIDTH + 1) * 4
NUM_READ: Final = 16384
"""Tokens of a text that are read, from its end."""


class Adjacency:
    """The rows of one sequence."""

    __slots__ = ("_owners", "_rows")

    def __init__(self) -> None:
        self._owners = np.zeros(NUM_SLOTS, np.int32)  # token + 1; 0 owns nothing
        self._rows = np.zeros((NUM_SLOTS, WIDTH), np.int32)  # token + 1; 0 is none

    def read_text(self, tokens: array[int]) -> None:
        """Puts in what followed each token of a text, the latest first."""
        text = np.array(tokens[-NUM_READ:], np.int64)
        if len(text) < 2:
            return
        pairs = text[:-1].copy()
        pairs <<= 32  # in place: no copies but those that are overwritten below
        pairs |= text[1:]
        pairs = pairs[::-1]
        _, newest = np.unique(pairs, return_index=True)  # the first, and so the latest in the text
        newest = newest[np.lexsort((newest, pairs[newest] >> 32))]
        firsts, seconds = pairs[newest] >> 32, pairs[newest] & 0xFFFFFFFF
        starts = np.flatnonzero(np.append(True, firsts[1:] != firsts[:-1]))
        ranks = np.arange(len(firsts)) - np.repeat(starts, np.diff(np.append(starts, len(firsts))))
        slots = firsts % NUM_SLOTS
        self._owners[slots] = firsts + 1
        is_kept = (ranks < WIDTH) & (self._owners[slots] == firsts + 1)  # of tokens with one slot the last one has it
        self._rows[slots[is_kept], ranks[is_kept]] = seconds[is_kept] + 1
        for used in (text, pairs, firsts, seconds):  # numpy keeps the memory of small arrays for others, as it is
            used.fill(0)

    def put(self, tokens: IntArray, candidates: IntArray) -> None:
        """Replaces rows.

        Args:
            tokens: [num_rows]; of equal ones the last counts.
            candidates: [num_rows, WIDTH] what may follow each, best first.
        """
        slots = tokens % NUM_SLOTS
        self._owners[slots] = tokens + 1
        self._rows[slots] = candidates + 1

    def row(self, token: int) -> list[int]:
        """Returns what may follow a token, best first, each one more than the token; 0 is none."""
        slot = token % NUM_SLOTS
        found: list[int] = self._rows[slot].tolist() if self._owners[slot] == token + 1 else []
        return found

    def copy(self) -> Adjacency:
        """Returns one that goes its own way."""
        twin = Adjacency()
        twin._owners[:] = self._owners
        twin._rows[:] = self._rows
        return twin

    def wipe(self) -> None:
        """Overwrites what is kept."""
        self._owners.fill(0)
        self._rows.fill(0)
