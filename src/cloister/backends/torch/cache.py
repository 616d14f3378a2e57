"""The paged KV cache of one program (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cloister.backends.base import IntArray, KVLayout
from cloister.backends.spec import AnyAttentionSpec, LatentAttentionSpec, kv_size


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where the keys and values of one position lie in its slot of a layer.

    Attributes:
        key_dim, value_dim: numbers of a KV head; its number times these is where it begins.
        value_start: where values begin; 0 in latent attention, whose value is the first part of its key.
        size: numbers in a slot.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_start: int
    size: int


def slot_layout(spec: AnyAttentionSpec) -> SlotLayout:
    """Returns the layout of a layer's slots."""
    if isinstance(spec, LatentAttentionSpec):
        return SlotLayout(1, spec.head_dim, spec.kv_lora_rank, 0, kv_size(spec))
    return SlotLayout(spec.num_kv_heads, spec.head_dim, spec.head_dim, spec.num_kv_heads * spec.head_dim, kv_size(spec))


class KVCache:
    """K and V of every layer, one slot per position of every block, and a last slot that stays zero.

    The zero slot stands for positions past a context, so that attention always reads splits of a fixed length.

    Attributes:
        layers: one tensor [num_slots + 1, size] each (`SlotLayout`).
    """

    def __init__(self, layout: KVLayout, layers: Sequence[AnyAttentionSpec], dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.zero_slot = layout.num_blocks * layout.block_size
        self.layers = [torch.zeros(self.zero_slot + 1, kv_size(layer), dtype=dtype, device=device) for layer in layers]

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
