"""Growable C arrays for the inputs of a forward pass: for the few numbers of a decode step numpy costs more than a loop."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from cloister.backends.base import IntArray


def block_tables(blocks: Sequence[array[int]], width: int) -> IntArray:
    """Returns the first `width` entries of each table, padded with zeros, [len(blocks), width] int32."""
    rows = array("i")
    for table in blocks:
        rows += table[:width]
        if len(table) < width:
            rows.frombytes(bytes(rows.itemsize * (width - len(table))))
    return as_ints(rows).reshape(len(blocks), width)


def as_ints(values: array[int]) -> IntArray:
    """Returns a view, not a copy."""
    return np.frombuffer(values, np.int32)


def overwrite(values: array[int]) -> None:
    """Fills an array with zeros: the tokens of a finished sequence are overwritten, not only released."""
    memoryview(values).cast("B")[:] = bytes(values.itemsize * len(values))
