"""What a drafter kept of a sequence is overwritten, not only let go of."""

from __future__ import annotations

from array import array


def overwrite(values: array[int]) -> None:
    """Fills an array with zeros."""
    memoryview(values).cast("B")[:] = bytes(values.itemsize * len(values))
