"""Estimates how often keys were accessed lately, in constant memory: a count-min sketch (Cormode & Muthukrishnan 2005) whose
counters are halved periodically (TinyLFU, Einziger et al. 2017). Pure: it is given its salt."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

NUM_ROWS: Final = 4
COUNTERS_PER_KEY: Final = 8
"""Counters in each row for each key that is to be told apart."""
MAX_COUNT: Final = 15
ACCESSES_PER_KEY: Final = 10
"""All counters are halved after this many accesses per key, so that old accesses count less and less."""
_HALVES: Final = bytes(count // 2 for count in range(256))
_ROWS: Final = struct.Struct(f"<{NUM_ROWS}Q")


class AccessSketch:
    """Counts accesses. An estimate is never too low before the first halving, and seldom too high.

    Args:
        num_keys: keys that are to be told apart, such as the blocks of a cache.
        salt: 16 secret bytes. Without them nobody can find keys that share counters with another one.
    """

    def __init__(self, num_keys: int, salt: bytes) -> None:
        self._salt = salt
        width = 1 << max(4, (COUNTERS_PER_KEY * num_keys - 1).bit_length())
        self._mask = width - 1
        self._firsts = tuple(row * width for row in range(NUM_ROWS))
        self._counters = bytearray(NUM_ROWS * width)
        self._period = ACCESSES_PER_KEY * max(1, num_keys)
        self._num_added = 0

    @property
    def num_bytes(self) -> int:
        return len(self._counters)

    def add(self, key: bytes) -> None:
        """Counts one access. Only the lowest of a key's counters grow, so that other keys are overestimated less."""
        places = self._places(key)
        counters = self._counters
        least = min([counters[place] for place in places])
        if least < MAX_COUNT:
            for place in places:
                if counters[place] == least:
                    counters[place] = least + 1
        self._num_added += 1
        if self._num_added >= self._period:
            self._num_added //= 2
            self._counters = counters.translate(_HALVES)

    def estimate(self, key: bytes) -> int:
        """Returns how often a key was accessed, at most `MAX_COUNT`."""
        counters = self._counters
        return min([counters[place] for place in self._places(key)])

    def _places(self, key: bytes) -> list[int]:
        hashes = _ROWS.unpack(blake2b(key, digest_size=_ROWS.size, key=self._salt).digest())
        mask = self._mask
        return [first + (number & mask) for first, number in zip(self._firsts, hashes, strict=True)]
