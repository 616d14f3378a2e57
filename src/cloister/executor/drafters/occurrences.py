"""An index of earlier occurrences of the last tokens of a growing sequence.

Hash chains as in LZ77 compressors (Deutsch 1996, RFC 1951, section 4), at several lengths: each position links to the previous
one that ended in the same n-gram. It stores positions, not tokens; candidates of a chain are compared with the sequence.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from cloister.executor.arrays import overwrite

ORDERS: Final = (8, 4, 2, 1)
"""Lengths of the n-grams that are indexed."""
MAX_LENGTH: Final = 32
"""Longest match length that is measured."""
NUM_TRIED: Final = 12
"""Number of positions of a chain that are checked, most recent first."""
NUM_KEPT: Final = 4
BYTES_PER_TOKEN: Final = len(ORDERS) * 3 * 4
"""Memory per position: an entry in each chain, and two slots for it."""
_FACTOR: Final = 0x9E3779B1
_MIXER: Final = 0x85EBCA6B
_HALF: Final = 15
_MODULUS: Final = 1 << 32
_MIN_SLOTS: Final = 64
_BULK: Final = 64
"""Number of tokens from which numpy is faster than a loop."""


class Occurrences:
    """The index of one sequence; it grows with it.

    A position is an end: `tokens[:end]` ends with the n-gram, and `tokens[end]` follows it.
    """

    __slots__ = ("_chains", "_powers")

    def __init__(self) -> None:
        self._chains = [_Chain(order) for order in ORDERS]

    def find(self, tokens: array[int]) -> list[tuple[int, int]]:
        """Returns (length, end) of earlier occurrences of the last tokens, longest first, then latest.

        They match the longest of `ORDERS` that occurred before: at most `NUM_KEPT` of the last `NUM_TRIED`. Lengths are capped
        at `MAX_LENGTH`.
        """
        num_tokens = len(tokens)
        for chain in self._chains:
            if chain.num_tokens > num_tokens:  # another sequence with the same id
                chain.wipe()
            chain.extend(tokens)
        for chain in self._chains:
            if num_tokens > chain.order and (found := _follow(tokens, chain.before, chain.order)):
                return found
        return []

    def wipe(self) -> None:
        """Overwrites the content."""
        for chain in self._chains:
            chain.wipe()


def _follow(tokens: array[int], before: array[int], order: int) -> list[tuple[int, int]]:
    num_tokens = len(tokens)
    suffix = tokens[num_tokens - order :]
    found = []
    end = before[num_tokens]
    for _ in range(NUM_TRIED):
        if not end:
            break
        if tokens[end - order : end] == suffix:
            found.append((_common_length(tokens, end, order), end))
        end = before[end]
    if len(found) > 1:
        found.sort(key=lambda match: -match[0])  # stable: the latest first among equals
        del found[NUM_KEPT:]
    return found


def _common_length(tokens: array[int], end: int, known: int) -> int:
    """Returns how many tokens before `end` equal those before the sequence's end."""
    last = len(tokens)
    length, most = known, min(end, MAX_LENGTH)
    while length < most and tokens[end - length - 1] == tokens[last - length - 1]:
        length += 1
    return length


class _Chain:
    """Ends of the n-grams of one length.

    Attributes:
        before: [num_tokens + 1] for each end the previous one with the same hash; 0 for none.
    """

    __slots__ = ("_hash", "_heads", "_leaving", "_shift", "before", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        self._leaving = pow(_FACTOR, order + 1, _MODULUS)
        self._start()

    def _start(self) -> None:
        self.before = array("i", (0,))
        self._heads = array("i", bytes(4 * _MIN_SLOTS))
        self._shift = _shift(_MIN_SLOTS)
        self._hash = 0

    @property
    def num_tokens(self) -> int:
        return len(self.before) - 1

    def extend(self, tokens: array[int]) -> None:
        """Adds new tokens of the sequence."""
        start, num_tokens = len(self.before), len(tokens)
        if num_tokens - start > _BULK or num_tokens > len(self._heads):
            self._build(tokens)
            return
        order, heads, shift, before = self.order, self._heads, self._shift, self.before
        for end in range(start, num_tokens + 1):
            # Rolling hash: the window's sum of token * _FACTOR ** (age + 1), advanced by one token.
            value = (self._hash + tokens[end - 1]) * _FACTOR
            if end > order:
                value -= tokens[end - 1 - order] * self._leaving
            self._hash = value = value % _MODULUS
            if end < order:
                before.append(0)
            else:
                slot = (value ^ value >> _HALF) * _MIXER % _MODULUS >> shift
                before.append(heads[slot])
                heads[slot] = end

    def _build(self, tokens: array[int]) -> None:
        """Vectorised `extend` for all tokens at once, with space for as many again."""
        self.wipe()
        num_tokens, order = len(tokens), self.order
        num_slots = 1 << num_tokens.bit_length()
        self._heads = array("i", bytes(4 * num_slots))
        self._shift = _shift(num_slots)
        values = np.frombuffer(tokens, np.int32).astype(np.uint32)
        hashes = np.zeros(max(0, num_tokens - order + 1), np.uint32)
        for age in range(order if len(hashes) else 0):
            hashes += values[order - 1 - age : num_tokens - age] * np.uint32(pow(_FACTOR, age + 1, _MODULUS))
        slots = (hashes ^ hashes >> np.uint32(_HALF)) * np.uint32(_MIXER) >> np.uint32(self._shift)
        by_slot = np.argsort(slots, kind="stable").astype(np.int32)
        follows = slots[by_slot[1:]] == slots[by_slot[:-1]]
        before = np.zeros(num_tokens + 1, np.int32)
        before[by_slot[1:][follows] + order] = by_slot[:-1][follows] + order
        is_last = np.append(~follows, True)[: len(by_slot)]
        np.frombuffer(self._heads, np.int32)[slots[by_slot[is_last]]] = by_slot[is_last] + order
        self.before = array("i", before.tobytes())
        self._hash = int(hashes[-1]) if len(hashes) else self._partial(tokens)

    def _partial(self, tokens: array[int]) -> int:
        value = 0
        for token in tokens:
            value = (value + token) * _FACTOR % _MODULUS
        return value

    def wipe(self) -> None:
        """Overwrites the content and resets."""
        overwrite(self.before)
        overwrite(self._heads)
        self._start()


def _shift(num_slots: int) -> int:
    """Returns the right shift that maps a 32-bit hash to one of 2 ** n slots: its upper bits are well mixed."""
    return 33 - num_slots.bit_length()
