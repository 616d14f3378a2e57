"""Draft heads for the native kernels: packed once in the type of weights that come as numbers, computed in one call."""

from __future__ import annotations

from typing import Final

import numpy as np

from cloister.backends.base import FloatArray, IntArray
from cloister.backends.draft_heads import DraftHeads, HeadBlock
from cloister.backends.native import _native
from cloister.backends.native.packing import PackedMatrix, Packer

_ACTIVATIONS: Final = {"silu": 0, "relu": 3}  # cpp/kernels.hpp


class HeadShelf:
    """The draft heads of one program; the kernels hold pointers into their arrays."""

    def __init__(self, program: _native.Program, packer: Packer) -> None:
        self._program, self._packer = program, packer
        self._held: list[PackedMatrix] = []

    def load(self, heads: DraftHeads) -> int:
        """Packs heads (`backends.base.Program.load_heads`)."""
        blocks = [self._pack(block, _ACTIVATIONS[heads.activation]) for block in heads.blocks]
        return self._program.load_heads([list(of_one_head) for of_one_head in zip(*blocks, strict=True)])

    def _pack(self, block: HeadBlock, activation: int) -> list[_native.FeedForward]:
        ups = [self._join(up, bias) for up, bias in zip(block.up, block.up_bias, strict=True)]
        biases = [None] * len(block.down) if block.down_bias is None else list(block.down_bias)
        downs = [self._join(down, bias) for down, bias in zip(block.down, biases, strict=True)]
        if len(ups) == 1:
            ups *= len(downs)
        return [
            _native.FeedForward(up=up, down=down, activation=activation, gated=False)
            for up, down in zip(ups, downs, strict=True)
        ]

    def _join(self, matrix: FloatArray, bias: FloatArray | None) -> _native.Matrix:
        packed = self._packer.join([matrix], [bias])
        self._held.append(packed)
        return packed.bind()

    def guess(self, loaded: int, hidden: FloatArray, num_heads: int, num_top: int) -> IntArray:
        """Computes heads (`backends.base.Program.guess`)."""
        top = np.empty((num_heads * len(hidden), num_top), np.int32)
        self._program.guess(loaded, hidden, num_heads, top)
        return top.reshape(num_heads, len(hidden), num_top)
