"""Tables of which a step reads the rows of its tokens (embeddings, inputs of layers), in memory in place of mapped files.

Which pages of a mapped file are in the page cache is seen by everybody who may write to it (mincore(2)), and which blocks are
read by the disk. From both follows which rows were looked up, and so the tokens of a prompt. Neither needs to read the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from cloister.backends.base import MemoryNeed, Weights
from cloister.backends.tensors import QuantizedTensor, Tensor


class CopiedTables:
    """Weights (`backends.base.Weights`) of which some tensors are copied when they are read.

    Args:
        names: of those tensors.
    """

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        self._weights = weights
        self._copied = frozenset(names)

    def names(self) -> Sequence[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def form(self, name: str) -> QuantizedTensor | None:
        return self._weights.form(name)

    def read(self, name: str) -> Tensor:
        tensor = self._weights.read(name)
        return np.array(tensor) if name in self._copied and isinstance(tensor, np.ndarray) else tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.names())


def copy_tables(weights: Weights, need: MemoryNeed) -> tuple[Weights, MemoryNeed]:
    """Returns weights of which a program leaves none mapped, and the memory that it needs then.

    Args:
        need: what `Backend.need` said for these weights; its `mapped` names the tensors.
    """
    names = [name for name in need.mapped if name in weights.names() and weights.form(name) is None]
    if not names:
        return weights, need
    copied = sum(math.prod(weights.shape(name)) * _item_bytes(weights, name) for name in names)
    return CopiedTables(weights, names), replace(need, weights_bytes=need.weights_bytes + copied, mapped=())


def _item_bytes(weights: Weights, name: str) -> int:
    tensor = weights.read(name)  # mapped, so nothing of it is loaded
    assert isinstance(tensor, np.ndarray), "what has no form comes as numbers"
    return tensor.itemsize
