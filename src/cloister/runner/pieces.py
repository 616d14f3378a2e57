"""Cuts logits into pieces of rows, so that what is computed from a piece stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

_PIECE_ELEMENTS = 2**18


def row_pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Yields slices that cover `num_rows` rows in order, each of about 2^18 elements and at least one row."""
    step = max(1, _PIECE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
