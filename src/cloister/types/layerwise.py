"""Prompts that are computed layer by layer, in memory for one layer (PrefillOnly, Du et al. 2025, sections 4 and 5). Pure.

A request that ends with its prompt needs the KV of a layer only until that layer is done. So all positions of the prompt pass
the first layer, in chunks, then the second: KV of one layer lies in scratch memory, which the next layer overwrites, beside the
residual stream of every position. Scratch memory is that of KV blocks: what a block holds of each layer is a *cell*.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class LayerwisePlan(msgspec.Struct, frozen=True):
    """How a part of a step (`SequencePlan`) advances a prompt that is computed layer by layer.

    A part of `num_tokens` does as much as computing so many positions in all layers: if R positions are to be computed in L
    layers, position `start` of the plan stands for (start - first) * L of R * L pairs, layer after layer.

    Attributes:
        first: first position to compute; those before it were found in the prefix cache.
        num_kept: leading entries of the block table that are KV of all layers; the blocks behind them are scratch memory.
        num_positions, num_layers: R and L.
    """

    first: int
    num_kept: int
    num_positions: int
    num_layers: int

    @property
    def may_repeat(self) -> bool:
        """Whether the last position may be computed again: that stands for L pairs, and of the last layer alone the input is
        still there."""
        return self.num_positions >= self.num_layers

    def first_of_last_layer(self, start: int) -> int:
        """Returns the first position of the last layer that a part which begins at `start` may compute."""
        return self.first + max(0, (start - self.first - self.num_positions) * self.num_layers + self.num_positions)


@dataclass(frozen=True, slots=True)
class CellLayout:
    """The cells of a program's blocks.

    Attributes:
        num_layers: cells of a block.
        num_blocks: blocks of each layer; cell m of block b is the memory of layer m, and has number m * num_blocks + b.
        num_residual: cells for the residual stream of `block_size` positions.
        hidden_size: numbers of the residual stream of a position, float32.
    """

    num_layers: int
    num_blocks: int
    num_residual: int
    hidden_size: int

    def count_blocks(self, num_entries: int, num_cached: int, num_kept: int) -> int:
        """Returns the blocks of scratch memory that a prompt needs.

        Args:
            num_entries: entries of its block table, if it were computed in all layers.
            num_cached: leading ones that were found in the prefix cache.
            num_kept: leading ones that have blocks of their own, those that were found included.
        """
        num_cells = num_entries - num_kept + self.num_residual * (num_entries - num_cached)
        return -(-num_cells // self.num_layers)

    def count_most_entries(self, num_blocks: int) -> int:
        """Returns the most entries of a prompt that so many blocks suffice for."""
        return num_blocks * self.num_layers // (1 + self.num_residual)
