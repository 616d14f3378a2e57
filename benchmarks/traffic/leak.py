"""What the number of frames tells of an answer's length, in bits. Pure.

Within a bucket an observer sees the same number of frames whatever the length, so what it learns of a length L drawn from a
known distribution is the mutual information I(L; bucket(L)), which is the entropy of the bucket: the bucket follows from L.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from cloister.trust.shape.shapes import find_edge


def count_bits(lengths: Iterable[int], shown: Callable[[int], int] = find_edge) -> float:
    """Returns the bits that `shown(length)` tells of a length drawn from `lengths` (frames; at least one)."""
    counts = Counter(map(shown, lengths))
    total = counts.total()
    if not total:
        raise ValueError("a distribution needs at least one length")
    return sum(n / total * math.log2(total / n) for n in counts.values())


def count_waste(lengths: Iterable[int], shown: Callable[[int], int] = find_edge) -> float:
    """Returns frames sent over frames needed, all answers together."""
    known = list(lengths)
    return sum(map(shown, known)) / sum(known)
