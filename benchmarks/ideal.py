"""The ideal prefix cache: unbounded, and nobody is evicted. What any real cache is measured against. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence


class IdealCache:
    """An unbounded cache of full blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[bytes] = set()

    def take(self, prompt: Sequence[int]) -> int:
        """Returns how many leading tokens of the prompt are there already, and keeps the prompt.

        The last token of a prompt is always computed, since its logits are wanted: a hit is at most `len(prompt) - 1` tokens,
        in whole blocks.
        """
        chain = self._chain(prompt)
        usable = chain[: (len(prompt) - 1) // self._block_size]
        num_hit = next((number for number, key in enumerate(usable) if key not in self._known), len(usable))
        self._known.update(chain)
        return num_hit * self._block_size

    def _chain(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of the full blocks of a prompt, each standing for everything up to its end."""
        digest = hashlib.blake2b(digest_size=16)
        keys = []
        for start in range(0, len(prompt) - self._block_size + 1, self._block_size):
            digest.update(array("q", prompt[start : start + self._block_size]).tobytes())
            keys.append(digest.copy().digest())
        return keys


def count_ideal_id_hits(rows: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Returns (hits, all) over the block ids of a trace as it stands: an id is hit if it was seen in an earlier row."""
    known: set[int] = set()
    num_hits = num_all = 0
    for ids in rows:
        num_hits += sum(block in known for block in ids)
        num_all += len(ids)
        known.update(ids)
    return num_hits, num_all
