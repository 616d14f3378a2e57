"""The paged KV cache of one program (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cloister.backends.base import ByteArray, IntArray, KVLayout
from cloister.backends.kv_planes import KVPlane
from cloister.backends.ranges import KVRanges
from cloister.backends.spec import AnyAttentionSpec, LatentAttentionSpec, StateSpec, kv_size
from cloister.backends.torch.packing import PackedBlocks, pack_moved
from cloister.types.layerwise import CellLayout


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
    """Returns the layout of the slots that a layer reads, which may be another's (`AttentionSpec.shared_kv`)."""
    if isinstance(spec, LatentAttentionSpec):
        return SlotLayout(1, spec.head_dim, spec.kv_lora_rank, 0, kv_size(spec))
    half = spec.num_kv_heads * spec.head_dim
    return SlotLayout(spec.num_kv_heads, spec.head_dim, spec.head_dim, half, 2 * half)


class KVCache:
    """K and V of every layer, one slot per position of every block, and a last slot that stays zero.

    The zero slot stands for positions past a context, so that attention always reads splits of a fixed length.

    Args:
        cells: where single layers may use the memory of all of them; None where they may not.

    Attributes:
        layers: one tensor [num_slots + 1, size] each (`SlotLayout`); size 0 where a layer has no KV of its own. It holds the
            newest positions only where layers pack the others.
        packed: by layer, the packed KV of those that do and have KV of their own.
        cells: with `cells`, the slots of all layers one after the other, and a zero slot: [num_slots of all + 1, size].
    """

    def __init__(
        self,
        layout: KVLayout,
        layers: Sequence[AnyAttentionSpec | None],
        dtype: torch.dtype,
        device: torch.device,
        cells: CellLayout | None = None,
    ) -> None:
        self.layout, self._attentions = layout, tuple(layers)
        self.cells: Tensor | None = None
        self._num_blocks = 0 if cells is None else cells.num_blocks
        is_packed = layout.recent_group is not None
        self._blocks = [layout.recent_blocks if is_packed else layout.blocks_of(number) for number in range(len(layers))]
        self.packed = {
            number: PackedBlocks(layer, len(layout.blocks_of(number)), layout.block_size, device)
            for number, layer in enumerate(layers)
            if is_packed and layer is not None and kv_size(layer)
        }
        sizes = [0 if layer is None else kv_size(layer) for layer in layers]
        if cells is None:
            self.layers = [
                torch.zeros(len(blocks) * layout.block_size + 1, size, dtype=dtype, device=device)
                for size, blocks in zip(sizes, self._blocks, strict=True)
            ]
            return
        stride = (cells.num_blocks + 1) * layout.block_size  # the first slot behind a layer's blocks is its zero slot
        self.cells = torch.zeros(len(layers) * stride + 1, sizes[0], dtype=dtype, device=device)
        ends = [number * stride + cells.num_blocks * layout.block_size + 1 for number in range(len(layers))]
        self.layers = [self.cells[end - 1 - cells.num_blocks * layout.block_size : end] for end in ends]

    def place_cells(self, numbers: IntArray) -> IntArray:
        """Returns cells by their place in `cells`, where each layer has one block more."""
        return numbers + numbers // self._num_blocks

    def read_cells(self, numbers: IntArray) -> ByteArray:
        """Returns a copy of what cells hold, [num_cells, bytes of a cell]."""
        return self._cell_bytes()[self.place_cells(numbers)]

    def write_cells(self, numbers: IntArray, contents: ByteArray) -> None:
        """Overwrites cells."""
        self._cell_bytes()[self.place_cells(numbers)] = contents

    def _cell_bytes(self) -> ByteArray:
        assert self.cells is not None
        num_bytes = self.layout.block_size * self.cells.shape[1] * self.cells.element_size()
        cells: ByteArray = self.cells[:-1].view(torch.uint8).numpy().reshape(-1, num_bytes)
        return cells

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target); no target may be a source of the same call."""
        for pages, blocks in self._pages():
            own = [(source - blocks.start, target - blocks.start) for source, target in pairs if source in blocks]
            if own:
                sources, targets = torch.tensor(own, device=pages.device).unbind(1)
                pages.index_copy_(0, targets, pages.index_select(0, sources))

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Overwrites whole blocks with zeros."""
        for pages, blocks in self._pages():
            own = [block - blocks.start for block in block_ids if block in blocks]
            if own:
                pages.index_fill_(0, torch.tensor(own, device=pages.device), 0)

    def rows(self, block: int) -> list[Tensor]:
        """Returns the numbers of a block in each layer that has it, in place."""
        return [pages[block - blocks.start] for pages, blocks in self._pages() if block in blocks]

    def list_planes(self, block: int) -> list[KVPlane]:
        """Returns where the numbers of a block lie in its rows (`backends.base.Program.list_planes`)."""
        planes: list[KVPlane] = []
        offset, length = 0, self.layout.block_size
        for slots, blocks, attention in zip(self.layers, self._blocks, self._attentions, strict=True):
            if self.packed or slots.dtype not in (torch.bfloat16, torch.float32):
                return []
            if block not in blocks or attention is None or not slots.shape[1]:
                continue
            slot, size = slot_layout(attention), slots.element_size()
            width = slots.shape[1]
            for first, end in (0, slot.value_start or width), (slot.value_start or width, width):
                if end > first:
                    planes.append(KVPlane(offset + first * size, size, length, 1, end - first, 1, width, 0, 1, 0))
            offset += length * width * size
        return planes

    def move(self, moves: IntArray) -> None:
        """Copies single slots (source, target), one after the other."""
        size = self.layout.block_size
        for source, target in moves.tolist():
            for slots, blocks in zip(self.layers, self._blocks, strict=True):
                if source // size in blocks:
                    slots[target - blocks.start * size] = slots[source - blocks.start * size]
        for number in self.packed:
            pairs = pack_moved(moves, self.layout, number)
            if pairs:
                self.pack(number, *torch.tensor(pairs, device=self.layers[number].device).unbind(1))

    def pack(self, layer: int, blocks: Tensor, sources: Tensor) -> None:
        """Packs blocks of the newest positions of a layer, all of which are there (`packing.StepBlocks`)."""
        if len(blocks):
            newest = self.layers[layer][:-1].view(-1, self.layout.block_size, self.layers[layer].shape[1])
            self.packed[layer].pack(blocks, newest.index_select(0, sources))

    def _pages(self) -> list[tuple[Tensor, range]]:
        """Returns the pages of each layer, and the numbers of its blocks."""
        size = self.layout.block_size
        pages = [
            (slots[:-1].view(len(blocks), size * slots.shape[1]), blocks)
            for slots, blocks in zip(self.layers, self._blocks, strict=True)
        ]
        return pages + [(packed.pages[:-1], self.layout.blocks_of(number)) for number, packed in self.packed.items()]


class RangedKVCache(KVCache):
    """K and V at the addresses of sequences: a position has the numbers of every layer one after the other, so the positions of
    one layer lie at equal distances from the first of a sequence to its last.

    Attributes:
        layout: of blocks numbered through all addresses (`KVRanges`).
        layers: as in `KVCache`, of all addresses; its rows lie apart.
    """

    def __init__(
        self, layout: KVLayout, layers: Sequence[AnyAttentionSpec | None], dtype: torch.dtype, ranges: KVRanges
    ) -> None:
        self.layout = KVLayout(ranges.num_addresses, layout.block_size)
        self.cells = None
        self.packed = {}
        self._blocks = [range(ranges.num_addresses)] * len(layers)
        self._memory = torch.from_numpy(ranges.memory).view(dtype)[: ranges.num_blocks]
        sizes = [0 if layer is None else kv_size(layer) for layer in layers]
        positions = torch.from_numpy(ranges.memory.reshape(-1)).view(dtype)
        positions = positions.view(-1, ranges.stride // layout.block_size // dtype.itemsize)
        positions = positions[: ranges.num_addresses * layout.block_size + 1, : sum(sizes)]
        self.layers = list(torch.split(positions, sizes, dim=1))

    def rows(self, block: int) -> list[Tensor]:
        """Returns the numbers of a block in each layer that has it, in place, [block_size, size] each."""
        size = self.layout.block_size
        return [slots[block * size : (block + 1) * size] for slots in self.layers]

    def _pages(self) -> list[tuple[Tensor, range]]:
        """Returns the pages of all layers together."""
        return [(self._memory, range(len(self._memory)))]


class StateCache:
    """The states of every layer that has one: one for each block.

    Attributes:
        layers: by number, [num_blocks, state_size] float32 each.
    """

    def __init__(self, layout: KVLayout, layers: Mapping[int, StateSpec], device: torch.device) -> None:
        self._blocks = layout.state_blocks
        self.layers = {
            number: torch.zeros(len(self._blocks), spec.state_size, device=device) for number, spec in layers.items()
        }

    def at(self, layer: int, block: int) -> Tensor:
        """Returns the state of a layer in a block, [state_size], in place."""
        return self.layers[layer][block - self._blocks.start]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies states (source, target) of every layer."""
        for number in self.layers:
            for source, target in pairs:
                if source in self._blocks:
                    self.at(number, target).copy_(self.at(number, source))

    def rows(self, block: int) -> list[Tensor]:
        """Returns the state of each layer in a block, in place."""
        return [self.at(number, block) for number in self.layers] if block in self._blocks else []

    def wipe(self, block_ids: Sequence[int]) -> None:
        """Overwrites states with zeros, which is what every sequence starts from."""
        for number in self.layers:
            for block in block_ids:
                if block in self._blocks:
                    self.at(number, block).zero_()


def export_rows(rows: Sequence[Tensor]) -> bytes:
    """Returns the bytes of tensors, one after the other."""
    return b"".join([row.contiguous().view(torch.uint8).cpu().numpy().data for row in rows])


def import_rows(rows: Sequence[Tensor], content: bytes | memoryview) -> None:
    """Overwrites tensors with bytes that `export_rows` returned."""
    numbers, first = torch.from_numpy(np.frombuffer(content, np.uint8).copy()), 0
    for row in rows:
        target = row.view(torch.uint8)
        target.copy_(numbers[first : first + row.nbytes].view(target.shape))
        first += row.nbytes
