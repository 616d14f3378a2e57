"""Weights on the device, each in its own number format, behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cloister.backends import tensors
from cloister.backends.base import Weights
from cloister.backends.tensors import GroupedTensor, ProgressiveTensor
from cloister.backends.torch.cuda.tiles import CODE_TILES, FLOAT_TILES, HALF_TILES, TileBook, random_rows
from cloister.backends.torch.reading import to_torch
from cloister.backends.torch.triton.grouped import TritonMatrix, grouped_matmul, pack
from cloister.backends.torch.triton.matmul import matmul


class Matrix(Protocol):
    """y = x W^T + b.

    Attributes:
        nbytes: what it takes on the device.
    """

    nbytes: int

    def multiply(self, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Returns [num_rows, outputs] for rows [num_rows, inputs] of the program's type."""
        ...


class DenseMatrix:
    """A plain weight [outputs, inputs], multiplied in an order that its rows' company does not change."""

    def __init__(self, weight: Tensor, bias: Tensor | None, book: TileBook) -> None:
        self._weight, self._bias, self._book = weight, bias, book
        self.nbytes = weight.nbytes
        rows = random_rows(weight.shape[1], weight.dtype, weight.device)
        self._tiles = book.measure(
            ("dense", weight.dtype, weight.shape[1], bias is None),
            lambda dtype, tile: matmul(rows, weight, bias, dtype, tile),
            FLOAT_TILES if weight.dtype == torch.float32 else HALF_TILES,
            weight.dtype,
        )

    def multiply(self, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
        tile = self._book.choose(self._tiles, len(rows), len(self._weight))
        return matmul(rows, self._weight, self._bias, out_dtype, tile)


class LibraryMatrix:
    """A plain weight, multiplied by cuBLAS: quickest, but it may pick another order of summation for another batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.nbytes = weight.nbytes

    def multiply(self, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
        bias = None if self._bias is None else self._bias.to(rows.dtype)
        return torch.nn.functional.linear(rows, self._weight, bias).to(out_dtype)


class QuantizedMatrix:
    """A weight in 4 or 8 bits (`backends.tensors`)."""

    def __init__(self, packed: TritonMatrix, bias: Tensor | None, dtype: torch.dtype, book: TileBook) -> None:
        self._packed, self._bias, self._book = packed, bias, book
        self.nbytes = packed.nbytes
        rows = random_rows(packed.num_inputs, dtype, packed.codes.device)
        self._tiles = book.measure(
            (*packed.kind, dtype, bias is None),
            lambda out_dtype, tile: grouped_matmul(rows, packed, bias, out_dtype, tile),
            FLOAT_TILES if dtype == torch.float32 else CODE_TILES,
            dtype,
        )

    def multiply(self, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
        tile = self._book.choose(self._tiles, len(rows), self._packed.num_outputs)
        return grouped_matmul(rows, self._packed, self._bias, out_dtype, tile)


class SideBySide:
    """Matrices of the same inputs whose formats differ; their outputs stand one after the other."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self._parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    def multiply(self, rows: Tensor, out_dtype: torch.dtype) -> Tensor:
        return torch.cat([part.multiply(rows, out_dtype) for part in self._parts], dim=1)


@dataclass(frozen=True, slots=True)
class MatrixReader:
    """Reads weights onto a device, one at a time.

    Attributes:
        is_exact: products keep batch invariance.
    """

    weights: Weights
    dtype: torch.dtype
    device: torch.device
    book: TileBook
    is_exact: bool

    def norm(self, name: str) -> Tensor:
        """A norm's weight, in float32."""
        return to_torch(tensors.dequantized(self.weights.read(f"{name}.weight"))).to(self.device, torch.float32)

    def matrix(self, *names: str, bias: bool) -> Matrix:
        """Projections of the same inputs, joined into one product where their formats are the same."""
        read = [self.weights.read(f"{name}.weight") for name in names]
        offsets = [self.bias(f"{name}.bias") for name in names] if bias else None
        joined = join_tensors(read)
        if joined is not None:
            return self._make(joined, None if offsets is None else torch.cat(offsets))
        return SideBySide([self._make(one, offsets[i] if offsets else None) for i, one in enumerate(read)])

    def bias(self, name: str) -> Tensor:
        """A bias, rounded to the program's type as the reference rounds it, and kept in float32."""
        return to_torch(tensors.dequantized(self.weights.read(name))).to(self.device, self.dtype).float()

    def plain(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A weight that is on the device already."""
        return DenseMatrix(weight, bias, self.book) if self.is_exact else LibraryMatrix(weight, bias)

    def _make(self, tensor: tensors.Tensor, bias: Tensor | None) -> Matrix:
        if isinstance(tensor, GroupedTensor | ProgressiveTensor):
            return QuantizedMatrix(pack(tensor, self.device), bias, self.dtype, self.book)
        return self.plain(to_torch(tensor).to(self.device, self.dtype), bias)


def join_tensors(parts: Sequence[tensors.Tensor]) -> tensors.Tensor | None:
    """Returns one tensor with the outputs of all, or None where their formats differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if all(isinstance(part, np.ndarray) and part.dtype == getattr(first, "dtype", None) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    grouped = [part for part in parts if isinstance(part, GroupedTensor)]
    if len(grouped) == len(parts) and len({_format(part) for part in grouped}) == 1:
        return replace(
            grouped[0],
            codes=np.concatenate([part.codes for part in grouped]),
            scales=np.concatenate([part.scales for part in grouped]),
            zeros=_concatenate([part.zeros for part in grouped]),
            offsets=_concatenate([part.offsets for part in grouped]),
        )
    progressive = [part for part in parts if isinstance(part, ProgressiveTensor)]
    if len(progressive) == len(parts) and len({(part.group_size, part.rotation) for part in progressive}) == 1:
        return ProgressiveTensor(
            codes=np.concatenate([part.codes for part in progressive]),
            channel_scales=np.concatenate([part.channel_scales for part in progressive]),
            group_scales=np.concatenate([part.group_scales for part in progressive]),
            zeros=np.concatenate([part.zeros for part in progressive]),
            group_size=progressive[0].group_size,
            rotation=progressive[0].rotation,
        )
    return None


def _format(part: GroupedTensor) -> tuple[object, ...]:
    """What must be equal for parts to be joined; an order of the inputs must be the same order."""
    order = None if part.order is None else part.order.tobytes()
    return part.bits, part.group_size, part.activations, part.rotation, part.zeros is None, part.offsets is None, order


def _concatenate(parts: Sequence[Any]) -> Any:
    return None if parts[0] is None else np.concatenate(parts)
