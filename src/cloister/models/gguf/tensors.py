"""The tensors of a GGUF file as `Weights`: each read from the mapped file when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import GroupedTensor, QuantizedTensor, Tensor
from cloister.models.gguf.blocks import NAMES_OF_OTHERS, TYPES, BlockType, Bytes, PlainType
from cloister.models.quantized import Stored
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

_CHUNK_BYTES = 4 << 20  # unpacked at a time, so that what unpacking holds besides its result stays small


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """Where one tensor lies and how it is stored.

    Attributes:
        start: offset of its first byte in the file.
        num_heads: heads whose rows are stored in pairs for rotation of neighbours (see `split_pairs`), or None.
    """

    path: Path
    name: str
    type: PlainType | BlockType
    shape: tuple[int, ...]
    start: int
    num_heads: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes

    def form(self) -> QuantizedTensor | None:
        """Returns a row of zeros as it is unpacked; None for numbers."""
        if isinstance(self.type, PlainType):
            return None
        row = np.zeros((1, self.shape[-1] // self.type.block_size * self.type.block_bytes), np.uint8)
        unpacked = self._unpack(row, self.type)
        if self.type.group_size == self.type.block_size:
            return unpacked
        return replace(unpacked, scales=np.full_like(unpacked.scales, 1 / 3))  # products of two numbers fit no float16

    def read(self) -> Tensor:
        """Returns the tensor; numbers stay mapped, blocks are unpacked.

        Raises:
            ModelError: a scale is infinite or no number.
        """
        raw: Bytes = np.memmap(self.path, np.uint8, "r", self.start, (self.num_bytes,))
        rows = split_pairs(np.asarray(raw).reshape(self.shape[0], -1), self.num_heads)
        if isinstance(self.type, PlainType):
            plain: npt.NDArray[Any] = rows.view(self.type.dtype).reshape(self.shape)
            return plain
        return self._unpack(rows, self.type)

    def _unpack(self, rows: Bytes, kind: BlockType) -> GroupedTensor:
        num_out, num_in = len(rows), rows.shape[1] // kind.block_bytes * kind.block_size
        codes = np.empty((num_out, num_in), np.uint8)
        scales = np.empty((num_out, num_in // kind.group_size), np.float32)
        offsets: list[npt.NDArray[np.float32]] = []
        step = max(1, _CHUNK_BYTES // rows.shape[1])
        for top in range(0, num_out, step):
            part = slice(top, top + step)
            with np.errstate(all="ignore"):  # what comes out is checked below
                some_codes, some_scales, some_offsets = kind.unpack(rows[part].reshape(-1, kind.block_bytes))
            codes[part], scales[part] = some_codes.reshape(-1, num_in), some_scales.reshape(-1, scales.shape[1])
            if some_offsets is not None:
                offsets.append(some_offsets.reshape(-1, scales.shape[1]))
        self._check_finite(scales, *offsets)
        middle = kind.zero == 1 << (kind.bits - 1)
        return GroupedTensor(
            codes=codes,
            scales=scales,
            zeros=None if middle else np.full(scales.shape, kind.zero, np.uint8),
            offsets=np.concatenate(offsets) if offsets else None,
            bits=kind.bits,
            group_size=kind.group_size,
            activations="int8_group",
        )

    def _check_finite(self, *arrays: npt.NDArray[np.float32]) -> None:
        if not all(np.isfinite(array).all() for array in arrays):
            raise ModelError(f"tensor {self.name!r} in {self.path.name} has a scale that is no number; download it again")


class GGUFWeights:
    """Weights in a GGUF file (protocol `backends.base.Weights`); nothing is in memory before it is read."""

    def __init__(self, entries: Mapping[str, Stored]) -> None:
        self._entries = dict(entries)

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def form(self, name: str) -> QuantizedTensor | None:
        return self._entries[name].form()

    def read(self, name: str) -> Tensor:
        return self._entries[name].read()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, entry.read()) for name, entry in self._entries.items())


def find_entry(file: GGUFFile, name: str, num_heads: int | None = None, expert: int | None = None) -> GGUFEntry:
    """Returns a tensor of the file.

    Args:
        expert: returns that matrix of a tensor that holds one for each expert.

    Raises:
        ModelError: it is of a type that is not supported, its rows are no whole blocks, or it lies outside the file.
    """
    tensor = file.tensors[name]
    if tensor.kind not in TYPES:
        found, known = (
            NAMES_OF_OTHERS.get(tensor.kind, f"number {tensor.kind}"),
            ", ".join(kind.name for kind in TYPES.values()),
        )
        raise ModelError(f"tensor {name!r} in {file.path.name} has the type {found}; supported are: {known}")
    entry = GGUFEntry(file.path, name, TYPES[tensor.kind], tensor.shape, tensor.start, num_heads)
    if expert is not None:
        entry = _take_expert(entry, expert, file)
    if len(entry.shape) != 2 and isinstance(entry.type, BlockType):
        raise ModelError(f"tensor {name!r} in {file.path.name} is of type {entry.type.name}; only matrices may be quantised")
    if 0 in entry.shape or entry.shape[-1] % entry.type.block_size or entry.start + entry.num_bytes > file.size_bytes:
        raise ModelError(f"{file.path.name} is damaged or cut short at the tensor {name!r}; download it again")
    return entry


def _take_expert(entry: GGUFEntry, number: int, file: GGUFFile) -> GGUFEntry:
    if len(entry.shape) != 3 or number >= entry.shape[0]:
        raise ModelError(
            f"tensor {entry.name!r} in {file.path.name} has the shape {entry.shape}, and no matrix for each expert"
        )
    matrix = replace(entry, shape=entry.shape[1:])
    return replace(matrix, start=entry.start + number * matrix.num_bytes)


def split_pairs(rows: Bytes, num_heads: int | None) -> Bytes:
    """Returns the rows of a projection in the half-split order of `backends.spec.RopeSpec`.

    llama.cpp rotates neighbours for the architecture llama: row 2 i + j of a head is row i + j * head_dim / 2 here.
    """
    if num_heads is None:
        return rows
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
