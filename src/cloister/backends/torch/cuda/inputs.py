"""The integers of a step, on the host as one array and on the device as one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cloister.backends.base import ForwardBatch
from cloister.backends.torch.cuda.work import KernelWork, pad_items, pad_joins
from cloister.backends.torch.schedule import token_slots
from cloister.backends.torch.triton.attention import Heads, Pages

_ALIGNED = 4  # integers; Triton compiles another kernel for a pointer that is not a multiple of 16 bytes

IntArray = npt.NDArray[np.int32]
_Event: Any = torch.cuda.Event  # its constructor carries no types


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """`work.KernelWork` on the device."""

    large: Tensor
    small: Tensor
    joins: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the kernels of a step read.

    Attributes:
        token_ids, positions, targets: [num_rows] int32; a target of -1 writes no K and V.
        logit_rows: [num_logits] int32.
        works: the attention work of each kind of layer.
    """

    token_ids: Tensor
    positions: Tensor
    targets: Tensor
    logit_rows: Tensor
    pages: Pages
    works: Mapping[Heads, DeviceWork]


@dataclass(frozen=True, slots=True)
class Padding:
    """Sizes that a captured step has, whatever the batch; all are upper bounds, in rows of the arrays."""

    num_seqs: int
    table_width: int
    num_items: int
    num_joins: int


def step_arrays(batch: ForwardBatch, works: Mapping[Heads, KernelWork], block_size: int) -> list[IntArray]:
    """Returns the arrays of a step as they are, in the order that `unpack` expects."""
    targets = token_slots(batch, block_size).astype(np.int32)
    arrays: list[IntArray] = [batch.token_ids, batch.positions, targets, batch.logit_rows]
    arrays += [batch.block_tables, batch.query_starts, batch.context_lens]
    return arrays + [part for work in works.values() for part in (work.large, work.small, work.joins)]


def padded_arrays(batch: ForwardBatch, works: Mapping[Heads, KernelWork], block_size: int, padding: Padding) -> list[IntArray]:
    """As `step_arrays` for a batch of one token each, at fixed sizes; padded rows write nothing and attend to nothing."""
    num_seqs, size = len(batch.context_lens), padding.num_seqs
    targets = token_slots(batch, block_size).astype(np.int32)
    tables = np.zeros((size, padding.table_width), np.int32)
    width = min(padding.table_width, batch.block_tables.shape[1])
    tables[:num_seqs, :width] = batch.block_tables[:, :width]
    starts = np.minimum(np.arange(size + 1, dtype=np.int32), np.int32(num_seqs))
    arrays = [_extend(batch.token_ids, size, 0), _extend(batch.positions, size, 0), _extend(targets, size, -1)]
    arrays += [np.arange(size, dtype=np.int32), tables, starts, _extend(batch.context_lens, size, 0)]
    for work in works.values():
        arrays += [work.large, pad_items(work.small, padding.num_items), pad_joins(work.joins, padding.num_joins)]
    return arrays


def unpack(parts: Sequence[Tensor], layers: Sequence[Heads], block_size: int) -> StepInputs:
    """Names the arrays of `step_arrays` once they are on the device.

    Args:
        layers: the kinds of layers, in the order of their works.
    """
    token_ids, positions, targets, logit_rows, tables, starts, contexts, *rest = parts
    works = {heads: DeviceWork(*rest[3 * number : 3 * number + 3]) for number, heads in enumerate(layers)}
    return StepInputs(token_ids, positions, targets, logit_rows, Pages(tables, starts, contexts, block_size), works)


class StepUploader:
    """Carries the arrays of a step to the device in one copy, from memory that the device can read by itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.int32)
        self._sent: Any = None

    def send(self, arrays: Sequence[IntArray], target: Tensor | None = None) -> list[Tensor]:
        """Returns the arrays on the device, in views of one tensor: `target`, or a new one.

        Args:
            target: [size] int32 on the device, where a captured step expects its arrays.
        """
        starts, size = _places(arrays)
        host = self._room(size)
        view = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            view[start : start + array.size] = array.reshape(-1)
        if target is None:
            target = torch.empty(size, dtype=torch.int32, device=self._device)
        target[:size].copy_(host, non_blocking=True)
        self._mark_sent()
        return [target[start : start + array.size].view(array.shape) for array, start in zip(arrays, starts, strict=True)]

    def _room(self, size: int) -> Tensor:
        """Host memory of `size` integers that no copy reads any more."""
        if self._sent is not None:
            self._sent.synchronize()
        if len(self._host) < size:
            self._host = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._host[:size]

    def _mark_sent(self) -> None:
        if self._device.type == "cuda":
            self._sent = self._sent or _Event()
            self._sent.record()


def num_integers(arrays: Sequence[IntArray]) -> int:
    """Returns how many integers `StepUploader.send` carries for arrays of these sizes."""
    return _places(arrays)[1]


def _places(arrays: Sequence[IntArray]) -> tuple[list[int], int]:
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-max(array.size, 1) // _ALIGNED) * _ALIGNED
    return starts, size


def _extend(values: IntArray, size: int, filler: int) -> IntArray:
    extended = np.full(size, filler, np.int32)
    extended[: len(values)] = values
    return extended
