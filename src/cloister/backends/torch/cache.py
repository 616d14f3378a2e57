"""The paged KV cache of one program (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cloister.backends.base import IntArray, KVLayout
from cloister.backends.spec import AttentionSpec


class KVCache:
    """K and V of every layer, one slot per position of every block, and a last slot that stays zero.

    The zero slot stands for positions past a context, so that attention always reads splits of a fixed length.

    Attributes:
        layers: one tensor [num_slots + 1, 2 * num_kv_heads * head_dim] each, K before V in a slot.
    """

    def __init__(self, layout: KVLayout, layers: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.zero_slot = layout.num_blocks * layout.block_size
        self.layers = [torch.zeros(self.zero_slot + 1, slot_size(layer), dtype=dtype, device=device) for layer in layers]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target); no target may be a source of the same call."""
        if not pairs:
            return
        for pages in self._pages():
            sources, targets = torch.tensor(pairs, device=pages.device).unbind(1)
            pages.index_copy_(0, targets, pages.index_select(0, sources))

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Overwrites whole blocks with zeros."""
        if not block_ids:
            return
        for pages in self._pages():
            pages.index_fill_(0, torch.tensor(list(block_ids), device=pages.device), 0)

    def move(self, moves: IntArray) -> None:
        """Copies single slots (source, target), one after the other."""
        for source, target in moves.tolist():
            for slots in self.layers:
                slots[target] = slots[source]

    def _pages(self) -> list[Tensor]:
        return [slots[:-1].view(self.layout.num_blocks, -1) for slots in self.layers]


def slot_size(layer: AttentionSpec) -> int:
    """Numbers that one position takes in one layer, K and V together."""
    return 2 * layer.num_kv_heads * layer.head_dim
