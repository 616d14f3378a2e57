"""KV in 2 bits (KIVI, Liu et al. 2024, arXiv:2402.02750): keys by channel, values by token, and the newest of both unpacked.

A channel of 32 consecutive keys, or 32 channels of one value, are codes of 2 bits with a scale and a zero point in bfloat16: a
number is code * scale + zero, 3 bits in all. Outliers of keys stay in few channels, so those get scales of their own. The four
numbers of keys reach from the least to the greatest, those of values are the middles of four equal parts of that range: in the
paper both reach to the ends, which leaves 1.5 times the squared error of values (docs/quantization.md says what both cost).

A group of keys can be packed only when all of it is known, so the newest keys and values are kept as they are, in a group of
blocks with a window (`KVGroup.is_recent`, decisions/0034). A query at position p reads positions from `first_recent(p)` on
unpacked and all others packed, whatever was computed with it, so its bits do not depend on chunks, company or drafts.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np

from cloister.backends.base import FloatArray
from cloister.types.errors import ConfigError

KIVI: Final = "kivi2"
GROUP: Final = 32
"""Keys of a channel, or channels of a value, that share a scale. A block of the cache holds whole groups of keys."""
RECENT_WINDOW: Final = 64
"""Newest positions that are never packed; a token tree may be as deep."""


def first_recent(position: int, block_size: int) -> int:
    """Returns the first position whose key and value a query reads unpacked."""
    return max(0, position - RECENT_WINDOW + 1) // block_size * block_size


def check_block_size(block_size: int) -> None:
    """Raises ConfigError unless a block holds whole groups of keys."""
    if block_size % GROUP:
        raise ConfigError(
            f"KV of type {KIVI} is packed in groups of {GROUP} positions, which a block of {block_size} does not hold; "
            f"set --block-size {GROUP} (or another multiple of it up to 256)",
            param="block_size",
        )


def round_groups(numbers: FloatArray, *, keys: bool) -> FloatArray:
    """Returns what groups [..., 32] of numbers are after they were packed; NaN if one of them is not finite.

    Args:
        keys: of a channel of keys, not of a value.
    """
    lowest, highest = numbers.min(-1, keepdims=True), numbers.max(-1, keepdims=True)
    scale = round_to_bfloat16((highest - lowest) / np.float32(3 if keys else 4))
    first = lowest if keys else lowest + (highest - lowest) / np.float32(8)
    zero = round_to_bfloat16(np.where(np.isfinite(numbers).all(-1, keepdims=True), first, np.float32(np.nan)))
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    rounded: FloatArray = np.rint(np.clip((numbers - zero) * inverse, 0, 3)) * scale + zero
    return rounded


def round_to_bfloat16(numbers: FloatArray) -> FloatArray:
    """Returns float32 numbers with the bits of the nearest bfloat16."""
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
