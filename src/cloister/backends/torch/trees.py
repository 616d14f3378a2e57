"""Token trees: every node becomes a sequence of its own, whose last keys lie in the slots of its ancestors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cloister.backends.base import ForwardBatch, IntArray


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One token of a tree in the unfolded batch.

    Attributes:
        seq: its sequence there.
        first_position: position of the oldest ancestor in this step.
        places: places of its ancestors in this step and its own, in the order of positions, and of what it sees behind itself
            (`ForwardBatch.last_seen`); a place counts a sequence's slots.
    """

    seq: int
    first_position: int
    places: tuple[int, ...]


def token_places(batch: ForwardBatch) -> npt.NDArray[np.int64]:
    """Returns the place of each token among its sequence's slots, [num_tokens]: its position, but in a tree."""
    counts = np.diff(batch.query_starts)
    first = (batch.context_lens - counts).astype(np.int64)
    return np.arange(len(batch.token_ids)) - np.repeat(batch.query_starts[:-1], counts) + np.repeat(first, counts)


def unfold(batch: ForwardBatch) -> tuple[ForwardBatch, list[TreeNode]]:
    """Returns a batch without trees, its tokens in the same order, and its nodes; the very batch if it has no tree."""
    if batch.parents is None:
        return batch, []
    counts: list[int] = []
    tables: list[IntArray] = []
    nodes: list[TreeNode] = []
    origins: list[int] = []
    last_seen = batch.positions if batch.last_seen is None else batch.last_seen
    for seq in range(len(batch.context_lens)):
        start, end = (int(place) for place in batch.query_starts[seq : seq + 2])
        is_chain = all(batch.parents[token] == (token - 1 if token > start else -1) for token in range(start, end))
        pieces = [end - start] if is_chain else [1] * (end - start)
        if not is_chain:
            first = int(batch.context_lens[seq]) - (end - start)
            for token in range(start, end):
                path = reversed([first + node - start for node in _ancestors(batch, token)])
                later = range(batch.positions[token] + 1, last_seen[token] + 1)  # known tokens, which lie at their positions
                nodes.append(TreeNode(len(counts) + token - start, first, (*path, *later)))
        counts += pieces
        origins += [seq] * len(pieces)
        tables += [batch.block_tables[seq]] * len(pieces)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    context_lens = (last_seen[starts[1:] - 1] + 1).astype(np.int32)
    unfolded = replace(batch, query_starts=starts, context_lens=context_lens, block_tables=np.stack(tables), parents=None)
    if batch.document_ranges is not None and batch.document_weights is not None:
        ranges, weights = batch.document_ranges[origins], batch.document_weights[origins]
        unfolded = replace(unfolded, document_ranges=ranges, document_weights=weights)
    return unfolded, nodes


def _ancestors(batch: ForwardBatch, token: int) -> Iterator[int]:
    """Yields a token, its parent, and so on up to the root."""
    assert batch.parents is not None
    while token >= 0:
        yield token
        token = int(batch.parents[token])
