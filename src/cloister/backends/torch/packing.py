"""KV in 2 bits (`backends.kivi`): blocks as bytes, and what a step reads of them and of the newest keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cloister.backends.base import ForwardBatch, IntArray, KVLayout
from cloister.backends.kivi import GROUP, RECENT_WINDOW, first_recent
from cloister.backends.spec import AnyAttentionSpec, AttentionSpec
from cloister.backends.torch.schedule import SPLIT, Run, UnitBatch


class PackedBlocks:
    """The packed KV of one layer; the last block stays zero.

    A block is [block_size / 4][channels] bytes of codes of keys, then [block_size][channels / 4] of values, whose heads are
    padded to whole groups, then (scale, zero) in bfloat16: [block_size / 32][2][channels] of keys, [block_size][groups][2] of
    values.

    Attributes:
        pages: [num_blocks + 1, bytes of a block] uint8.
    """

    def __init__(self, spec: AnyAttentionSpec, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._heads, self._dim, self._size = spec.num_kv_heads, spec.head_dim, block_size
        self._padding = -spec.head_dim % GROUP
        self._sizes = packed_sizes(spec, block_size)
        self.pages = torch.zeros(num_blocks + 1, sum(self._sizes), dtype=torch.uint8, device=device)

    def pack(self, blocks: Tensor, numbers: Tensor) -> None:
        """Writes blocks.

        Args:
            blocks: their numbers.
            numbers: [len(blocks), block_size, 2 * channels] keys and values of every position, of any type.
        """
        keys, values = numbers.float().chunk(2, dim=-1)
        key_codes, key_scales = _encode(_group(keys, 1, GROUP), 2, keys=True)
        value_codes, value_scales = _encode(self._grouped(values), -1, keys=False)
        parts = (
            _join_codes(key_codes.flatten(1, 2), 1),
            _join_codes(value_codes.flatten(2), 2),
            torch.stack(key_scales, 2).contiguous().view(torch.uint8),
            torch.stack(value_scales, -1).contiguous().view(torch.uint8),
        )
        self.pages[blocks] = torch.cat([part.flatten(1) for part in parts], 1)

    def unpack(self, blocks: Tensor) -> Tensor:
        """Returns float32 [len(blocks), block_size, 2 * channels]."""
        parts = torch.split(self.pages[blocks], list(self._sizes), 1)
        channels = self._heads * self._dim
        codes = _group(_split_codes(parts[0].view(len(blocks), -1, channels), 1), 1, GROUP)
        scales = parts[2].contiguous().view(torch.bfloat16).float().view(len(blocks), -1, 2, channels)
        keys = codes * scales[:, :, 0, None] + scales[:, :, 1, None]
        codes = _group(_split_codes(parts[1].view(len(blocks), self._size, -1), 2), 2, GROUP)
        scales = parts[3].contiguous().view(torch.bfloat16).float().view(len(blocks), self._size, -1, 2)
        values = (codes * scales[..., :1] + scales[..., 1:]).view(len(blocks), self._size, self._heads, -1)[..., : self._dim]
        return torch.cat([keys.flatten(1, 2), values.flatten(2)], 2)

    def _grouped(self, values: Tensor) -> Tensor:
        """Returns [num_blocks, block_size, groups, 32]; padding repeats a number, which changes no scale."""
        heads = _group(values, 2, self._dim)
        if self._padding:
            heads = torch.cat([heads, heads[..., -1:].expand(*heads.shape[:-1], self._padding)], -1)
        return _group(heads.flatten(2), 2, GROUP)


def packed_sizes(spec: AnyAttentionSpec, block_size: int) -> tuple[int, int, int, int]:
    """Returns the bytes of the four parts of a block; none where a layer reads the KV of an earlier one."""
    if isinstance(spec, AttentionSpec) and spec.shared_kv is not None:
        return 0, 0, 0, 0
    keys = spec.num_kv_heads * spec.head_dim
    values = spec.num_kv_heads * (spec.head_dim + -spec.head_dim % GROUP)
    return keys * block_size // 4, values * block_size // 4, keys * block_size // GROUP * 4, values * block_size // GROUP * 4


def _group(numbers: Tensor, dim: int, size: int) -> Tensor:
    """Splits a dimension into groups of `size`."""
    return numbers.reshape(*numbers.shape[:dim], -1, size, *numbers.shape[dim + 1 :])


def _encode(groups: Tensor, dim: int, *, keys: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns codes, and scales and zero points in bfloat16 without that dimension (`kivi.round_groups`)."""
    lowest, highest = groups.amin(dim), groups.amax(dim)
    scale = ((highest - lowest) / (3 if keys else 4)).bfloat16()
    zero = (lowest if keys else lowest + (highest - lowest) / 8).masked_fill(~groups.isfinite().all(dim), torch.nan).bfloat16()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = ((groups - zero.float().unsqueeze(dim)) * inverse.unsqueeze(dim)).clamp(0, 3).nan_to_num(0).round()
    return codes.to(torch.uint8), (scale, zero)


def _join_codes(codes: Tensor, dim: int) -> Tensor:
    """Puts four codes of a dimension into a byte."""
    parts = _group(codes, dim, 4).unbind(dim + 1)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


def _split_codes(packed: Tensor, dim: int) -> Tensor:
    return torch.stack([packed >> 2 * place & 3 for place in range(4)], dim + 1).flatten(dim, dim + 1).float()


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Which blocks of the newest keys and values belong to which packed ones in a step, for one group of layers.

    Attributes:
        recent_of: [num_blocks + 1] the block of the newest that has the same positions, less the first of those; -1 for none.
        packed, sources: blocks of both that the tokens of the step fill, counted in the same way.
    """

    recent_of: Tensor
    packed: Tensor
    sources: Tensor


def match_blocks(batch: ForwardBatch, layout: KVLayout, layer: int, device: torch.device) -> StepBlocks:
    """Returns the blocks of a step for the group of a layer."""
    recent, size = layout.recent_group, layout.block_size
    assert recent is not None
    own, others, num_groups = layout.blocks_of(layer), layout.recent_blocks, len(layout.groups)
    packed_tables = batch.block_tables[:, layout.group_of(layer) :: num_groups] - own.start
    recent_tables = batch.block_tables[:, recent::num_groups] - others.start
    recent_of = np.full(len(own) + 1, -1, np.int64)
    filled: list[tuple[int, int]] = []
    starts = batch.context_lens - np.diff(batch.query_starts)
    for seq, (start, context) in enumerate(zip(starts.tolist(), batch.context_lens.tolist(), strict=True)):
        entries = slice(first_recent(start, size) // size, -(-context // size))
        recent_of[packed_tables[seq, entries]] = recent_tables[seq, entries]
        whole = slice(start // size, context // size)
        filled += zip(packed_tables[seq, whole].tolist(), recent_tables[seq, whole].tolist(), strict=True)
    packed, sources = torch.tensor(filled, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    return StepBlocks(torch.from_numpy(recent_of).to(device), packed, sources)


@dataclass(frozen=True, slots=True)
class TwoForms:
    """The keys and values of a layer in both forms, as attention reads them.

    Attributes:
        packed: all full blocks.
        slots: [num_slots + 1, size] the newest, as in a cache without packed ones.
        recent_of: as in `StepBlocks`.
        positions: [num_rows] of the tokens of the step.
        block_size: of both.
    """

    packed: PackedBlocks
    slots: Tensor
    recent_of: Tensor
    positions: Tensor
    block_size: int

    def read(self, run: Run) -> tuple[Tensor, Tensor]:
        """Returns what the run reads packed and what it reads of the newest, [num_splits * num_units * width, size] float32."""
        slots = run.pages
        if run.page_size > 1:
            slots = (slots[:, None] * run.page_size + torch.arange(run.page_size, device=slots.device)).flatten()
        blocks, places = slots // self.block_size, slots % self.block_size
        different, which = torch.unique(blocks, return_inverse=True)
        recent = self.recent_of[blocks]
        newest = torch.where(recent < 0, len(self.slots) - 1, recent * self.block_size + places)
        return self.packed.unpack(different)[which, places], self.slots.index_select(0, newest).float()

    def is_recent(self, batch: UnitBatch, run: Run, num_kv_heads: int, num_heads: int) -> Tensor:
        """Returns which keys each row reads of the newest, [num_splits * num_units, num_rows, width]."""
        tokens = (batch.sources // num_heads).view(num_kv_heads, batch.num_units, batch.num_rows)[0, : run.num_units]
        first = (self.positions[tokens] - RECENT_WINDOW + 1).clamp(min=0) // self.block_size * self.block_size
        splits = (run.first_split + torch.arange(run.num_splits, device=first.device)) * SPLIT
        places = splits[:, None] + torch.arange(run.width, device=first.device)
        return (places[:, None, None, :] >= first[None, :, :, None]).flatten(0, 1)


def pack_moved(moves: IntArray, layout: KVLayout, layer: int) -> Sequence[tuple[int, int]]:
    """Returns (packed block, block of the newest) that single positions were moved to, which may be full now.

    Moves of all groups come in the same order (`Program.move_positions`).
    """
    size, own, others = layout.block_size, layout.blocks_of(layer), layout.recent_blocks
    targets = [int(target) // size for _, target in moves]
    packed = [block - own.start for block in targets if block in own]
    recent = [block - others.start for block in targets if block in others]
    return sorted(set(zip(packed, recent, strict=True)))
