"""The ideal prefix cache: unbounded, and nobody is evicted. What any real cache is measured against. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence


def count_ideal_hits(prompts: Iterable[Sequence[int]], block_size: int) -> list[int]:
    """Returns, per prompt, the leading tokens that an unbounded cache of full blocks would have.

    The last token of a prompt is always computed, since its logits are wanted: a hit is at most `len(prompt) - 1` tokens,
    in whole blocks. Prompts come one after the other.
    """
    known: set[bytes] = set()
    hits = []
    for prompt in prompts:
        chain = _chain(prompt, block_size)
        usable = chain[: (len(prompt) - 1) // block_size]
        num_hit = next((number for number, key in enumerate(usable) if key not in known), len(usable))
        hits.append(num_hit * block_size)
        known.update(chain)
    return hits


def count_ideal_id_hits(rows: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Returns (hits, all) over the block ids of a trace as it stands: an id is hit if it was seen in an earlier row."""
    known: set[int] = set()
    num_hits = num_all = 0
    for ids in rows:
        num_hits += sum(block in known for block in ids)
        num_all += len(ids)
        known.update(ids)
    return num_hits, num_all


def _chain(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of the full blocks of `tokens`, each standing for everything up to its end."""
    digest = hashlib.blake2b(digest_size=16)
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        digest.update(array("q", tokens[start : start + block_size]).tobytes())
        keys.append(digest.copy().digest())
    return keys
