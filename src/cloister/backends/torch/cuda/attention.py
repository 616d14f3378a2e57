"""Attention of a step on the device, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cloister.backends.base import ForwardBatch
from cloister.backends.torch.cuda.inputs import StepInputs
from cloister.backends.torch.cuda.memory import PARTIAL_BYTES
from cloister.backends.torch.cuda.work import KernelLimits, KernelWork, cut_work
from cloister.backends.torch.schedule import AttentionShape
from cloister.backends.torch.triton.attention import Binding, Heads, Pages, Partials, Tiles, attend, make_partials
from cloister.backends.torch.triton.matmul import join_splits

_LARGE_ROWS: Final = 64
SMALL_ROWS: Final = 16


class AttentionKernels(Protocol):
    """How a step attends."""

    def attend(self, number: int, heads: Heads, queries: Tensor, slots: Tensor, step: StepInputs) -> Tensor:
        """Returns [num_rows, num_heads * head_dim] of layer `number`; `queries` as `Layer.project` returns them."""
        ...


class PagedAttention:
    """Attention by the Triton kernels.

    Args:
        layers: the heads of each layer.
        num_places: multiprocessors.

    Attributes:
        layers: the kinds of layers, each once.
    """

    def __init__(self, layers: Sequence[Heads], dtype: torch.dtype, device: torch.device, num_places: int) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self._num_places = num_places
        self._binding: Binding = "multiprocessor" if device.type == "cuda" else "virtual"
        self._counters = torch.zeros(len(layers), 2 + num_places, dtype=torch.int32, device=device)
        self._partials = {heads: make_partials(_partial_rows(heads), heads, device) for heads in self.layers}
        self._tiles = {heads: choose_tiles(heads, dtype, device) for heads in self.layers}

    def cut(self, batch: ForwardBatch) -> dict[Heads, KernelWork]:
        """Cuts a step for every kind of layer, always in the same order."""
        return {heads: self._cut(batch, heads) for heads in self.layers}

    def begin(self) -> None:
        """Prepares a step that may be hybrid; a captured decode step needs it not."""
        self._counters.zero_()

    def attend(self, number: int, heads: Heads, queries: Tensor, slots: Tensor, step: StepInputs) -> Tensor:
        """Returns [num_rows, num_heads * head_dim] (`AttentionKernels.attend`)."""
        work, partials = step.works[heads], self._partials[heads]
        out = torch.zeros_like(queries)  # rows that only fill a captured step up are left as they are
        attend(
            queries, slots, step.pages, work.large, work.small, out, partials,
            heads=heads, tiles=self._tiles[heads], counters=self._counters[number], binding=self._binding,
        )  # fmt: skip
        join_splits(work.joins, step.pages, out, partials, heads)
        return out.view(len(out), -1)

    def _cut(self, batch: ForwardBatch, heads: Heads) -> KernelWork:
        tiles = self._tiles[heads]
        limits = KernelLimits(tiles.large, tiles.small, self._num_places, len(self._partials[heads].mixed))
        return cut_work(batch.query_starts, batch.context_lens, shape_of(heads), limits)


def shape_of(heads: Heads) -> AttentionShape:
    """Returns the properties of a layer that decide how its work is split."""
    return AttentionShape(heads.num_heads, heads.num_kv_heads, heads.window or None)


def choose_tiles(heads: Heads, dtype: torch.dtype, device: torch.device) -> Tiles:
    """Returns the tiles whose rows have the same bits, measured on the device (as `tiles.TileBook` for products).

    The small tile is given up where a tensor core that takes more rows at once rounds otherwise, and the large one where it
    does not fit or where there is no tensor core for the type (float32).
    """
    num_warps = 8 if heads.head_dim > 128 else 4
    few = Tiles(SMALL_ROWS, SMALL_ROWS, num_warps)
    if dtype == torch.float32:
        return few
    many, both = Tiles(_LARGE_ROWS, _LARGE_ROWS, num_warps), Tiles(_LARGE_ROWS, SMALL_ROWS, num_warps)
    try:
        reference = _sample(heads, dtype, device, many)
    except OutOfResources:
        return few
    return both if torch.equal(_sample(heads, dtype, device, both), reference) else many


def _partial_rows(heads: Heads) -> int:
    return PARTIAL_BYTES // (4 * heads.num_kv_heads * (heads.head_dim + 2))


def _sample(heads: Heads, dtype: torch.dtype, device: torch.device, tiles: Tiles) -> Tensor:
    """Attends from one token to a thousand random keys, split by split."""
    num_keys, generator = 1000, torch.Generator().manual_seed(heads.head_dim)
    slots = torch.randn(num_keys, 2 * heads.num_kv_heads * heads.head_dim, generator=generator).to(device, dtype)
    queries = torch.randn(1, heads.num_heads, heads.head_dim, generator=generator).to(device, dtype)
    table = torch.arange(num_keys, dtype=torch.int32, device=device)
    starts, contexts = table[:2], table[num_keys - 1 :] + 1
    pages = Pages(table[None], starts, contexts, block_size=1)
    limits = KernelLimits(tiles.large, tiles.small, 1, 0)
    work = cut_work(np.array([0, 1], np.int32), np.array([num_keys], np.int32), shape_of(heads), limits)
    out = torch.empty_like(queries)
    large, small = (torch.from_numpy(items).to(device) for items in (work.large, work.small))
    partials = Partials(queries.new_empty(1, dtype=torch.float32), queries.new_empty(1, dtype=torch.float32))
    attend(
        queries, slots, pages, large, small, out, partials,
        heads=heads, tiles=tiles, counters=torch.zeros_like(table[:3]), binding="interleaved",
    )  # fmt: skip
    return out
