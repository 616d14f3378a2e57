"""`Weights` over the tensors of a GGUF file, each read from the mapped file on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import E2M1_CODES, GroupedTensor, QuantizedTensor, Tensor, take_rows
from cloister.models.quantized import Stored
from cloister.models.quantized.mxfp4 import half_scales
from cloister.models.quantized.nvfp4 import decode_e4m3
from cloister.types.errors import ModelError
from cloister.types.gguf import GGUFFile

# Decodes GGUF block types into codes, scales and offsets, one value per group.
#
# A row is a run of blocks, each with the numbers of 32 or 256 consecutive weights (llama.cpp's ggml-common.h has the
# layouts). Every step is arranged as in the reference, so `GroupedTensor.dequantize` equals it in every bit. Codes of 5 and 6
# bits travel in bytes. Where no code below 0 is meant, bytes are moved up by 128, so that 128 is the zero of every 8-bit type
# here.


_HALF = np.uint8(4)
Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Parts: TypeAlias = tuple[Bytes, Floats, Floats | None]
"""codes [num_blocks, block_size], scales and offsets [num_blocks, block_size / group_size]."""


@dataclass(frozen=True, slots=True)
class PlainType:
    """One number for each weight."""

    name: str
    dtype: npt.DTypeLike
    block_size: int = 1

    @property
    def block_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BlockType:
    """Quantised blocks.

    Attributes:
        block_size: weights in a block.
        bits: of a code as it leaves `unpack`: 4 or 8.
        zero: the code that stands for 0 before the offset.
        unpack: blocks [num_blocks, block_bytes] to their parts.
        is_mxfp4: as in `backends.tensors.GroupedTensor`.
        is_nvfp4: the same; such a tensor may have a factor in a tensor of its own.
    """

    name: str
    block_size: int
    block_bytes: int
    bits: int
    group_size: int
    zero: int
    unpack: Callable[[Bytes], Parts]
    is_mxfp4: bool = False
    is_nvfp4: bool = False


def _unpack_q4_0(blocks: Bytes) -> Parts:
    return _halves(blocks[:, 2:]), _float(blocks, 0), None


def _unpack_q4_1(blocks: Bytes) -> Parts:
    return _halves(blocks[:, 4:]), _float(blocks, 0), _float(blocks, 2)


def _unpack_q5_0(blocks: Bytes) -> Parts:
    codes = _halves(blocks[:, 6:]) | (_bits(blocks[:, 2:6]) << _HALF)
    return codes + np.uint8(128 - 16), _float(blocks, 0), None


def _unpack_q5_1(blocks: Bytes) -> Parts:
    codes = _halves(blocks[:, 8:]) | (_bits(blocks[:, 4:8]) << _HALF)
    return codes + np.uint8(128), _float(blocks, 0), _float(blocks, 2)


def _unpack_q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:] ^ np.uint8(128), _float(blocks, 0), None


def _unpack_q4_k(blocks: Bytes) -> Parts:
    return (_planes(blocks[:, 16:], 32, 4).reshape(-1, 256), *_k_scales(blocks))


def _unpack_q5_k(blocks: Bytes) -> Parts:
    low, high = _planes(blocks[:, 48:], 32, 4), _planes(blocks[:, 16:48], 32, 1)
    return ((low | (high << _HALF)).reshape(-1, 256) + np.uint8(128), *_k_scales(blocks))


def _unpack_q6_k(blocks: Bytes) -> Parts:
    low, high = _planes(blocks[:, :128], 64, 4).reshape(-1, 256), _planes(blocks[:, 128:192], 32, 2).reshape(-1, 256)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return (low | (high << _HALF)) + np.uint8(128 - 32), _float(blocks, 208) * scales, None


def _unpack_mxfp4(blocks: Bytes) -> Parts:
    """E2M1 numbers with an E8M0 scale; 255 is no number, and is found out as others are."""
    scales = np.where(blocks[:, :1] == 255, np.float32(np.nan), half_scales(blocks[:, :1]))
    return E2M1_CODES[_halves(blocks[:, 1:])], scales, None


def _unpack_nvfp4(blocks: Bytes) -> Parts:
    """Four E4M3 scales without signs, then four runs of 16 E2M1 numbers, the first half of a run in the low halves of bytes."""
    scales = np.where(blocks[:, :4] < 127, decode_e4m3(blocks[:, :4]) / 2, np.float32(np.nan))
    runs = blocks[:, 4:].reshape(-1, 4, 8)
    return E2M1_CODES[np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 64)], scales, None


def _float(blocks: Bytes, start: int) -> Floats:
    """The float16 at a place in each block, [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little")


def _planes(packed: Bytes, run: int, bits: int) -> Bytes:
    """Runs of bytes, each holding 8 / bits runs of codes, lowest bits first: [num_blocks, num_runs of codes, run]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes: Bytes = (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return planes.reshape(len(packed), -1, run)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the eight groups of a Q4_K or Q5_K block.

    Twelve bytes hold eight 6-bit scales and eight 6-bit minima: the first four of each whole in bytes 0-3 and 4-7, whose
    two top bits belong to the last four of each, which have their low bits in bytes 8-11.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=1)
    return _float(blocks, 0) * scales.astype(np.float32), -(_float(blocks, 2) * minima.astype(np.float32))


TYPES: Mapping[int, PlainType | BlockType] = {
    0: PlainType("F32", np.float32),
    1: PlainType("F16", np.float16),
    30: PlainType("BF16", ml_dtypes.bfloat16),
    2: BlockType("Q4_0", 32, 18, 4, 32, 8, _unpack_q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 32, 0, _unpack_q4_1),
    6: BlockType("Q5_0", 32, 22, 8, 32, 128, _unpack_q5_0),
    7: BlockType("Q5_1", 32, 24, 8, 32, 128, _unpack_q5_1),
    8: BlockType("Q8_0", 32, 34, 8, 32, 128, _unpack_q8_0),
    12: BlockType("Q4_K", 256, 144, 4, 32, 0, _unpack_q4_k),
    13: BlockType("Q5_K", 256, 176, 8, 32, 128, _unpack_q5_k),
    14: BlockType("Q6_K", 256, 210, 8, 16, 128, _unpack_q6_k),
    39: BlockType("MXFP4", 32, 17, 8, 32, 128, _unpack_mxfp4, is_mxfp4=True),
    40: BlockType("NVFP4", 64, 36, 8, 16, 128, _unpack_nvfp4, is_nvfp4=True),
}
"""By the format's number for the type."""

NAMES_OF_OTHERS: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0",
}  # fmt: skip
"""For messages."""


_CHUNK_BYTES = 4 << 20  # unpacked at a time, so that what unpacking holds besides its result stays small


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """Where one tensor lies and how it is stored.

    Attributes:
        start: offset of its first byte in the file.
        num_heads: heads whose rows are stored in pairs for rotation of neighbours (see `split_pairs`), or None.
        factor_start: offset of the float32 that its weights are multiplied by, or None.
    """

    path: Path
    name: str
    type: PlainType | BlockType
    shape: tuple[int, ...]
    start: int
    num_heads: int | None = None
    factor_start: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes

    def form(self) -> QuantizedTensor | None:
        """Returns a row of zeros as it is unpacked; None for numbers."""
        if isinstance(self.type, PlainType):
            return None
        row = np.zeros((1, self.shape[-1] // self.type.block_size * self.type.block_bytes), np.uint8)
        unpacked = self._unpack(row, self.type)
        if self.type.group_size == self.type.block_size or self.type.is_nvfp4:
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
        factor = self._read_factor(num_out) if kind.is_nvfp4 else None
        self._check_finite(scales, *offsets, *([] if factor is None else [factor]))
        middle = kind.zero == 1 << (kind.bits - 1)
        return GroupedTensor(
            codes=codes,
            scales=scales,
            zeros=None if middle else np.full(scales.shape, kind.zero, np.uint8),
            offsets=np.concatenate(offsets) if offsets else None,
            bits=kind.bits,
            group_size=kind.group_size,
            activations="bfloat16" if kind.is_nvfp4 else "int8_group",
            is_mxfp4=kind.is_mxfp4,
            output_scales=factor,
            is_nvfp4=kind.is_nvfp4,
        )

    def _read_factor(self, num_out: int) -> npt.NDArray[np.float32]:
        if self.factor_start is None:
            return np.ones(num_out, np.float32)
        return np.full(num_out, np.memmap(self.path, np.uint8, "r", self.factor_start, (4,)).view(np.float32)[0], np.float32)

    def _check_finite(self, *arrays: npt.NDArray[np.float32]) -> None:
        if not all(np.isfinite(array).all() for array in arrays):
            raise ModelError(
                f"tensor {self.name!r} in {self.path.name} has a scale that is no number; download or copy it again"
            )


@dataclass(frozen=True, slots=True)
class Reordered:
    """A tensor whose outputs or inputs are stored in another order (protocol `quantized.Stored`).

    Attributes:
        axis: 0 for outputs, 1 for inputs.
        places: [size] where each of its own is stored.
    """

    stored: Stored
    axis: int
    places: npt.NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def form(self) -> QuantizedTensor | None:
        return self.stored.form()

    def read(self) -> Tensor:
        """Returns the tensor in its own order; codes stay codes.

        Raises:
            ModelError: inputs that share a scale would be parted.
        """
        tensor = self.stored.read()
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor.take(self.places, self.axis))
        if self.axis == 0:
            return take_rows(tensor, self.places)
        size = tensor.group_size
        groups = self.places[::size] // size
        if not isinstance(tensor, GroupedTensor) or not np.array_equal(
            self.places, (groups[:, None] * size + np.arange(size)).ravel()
        ):
            raise ModelError("heads of linear attention whose size is no multiple of 32 must not be quantised; use F16 files")
        return replace(
            tensor,
            codes=tensor.codes[:, self.places],
            scales=tensor.scales[:, groups],
            zeros=None if tensor.zeros is None else tensor.zeros[:, groups],
            offsets=None if tensor.offsets is None else tensor.offsets[:, groups],
        )


def find_entry(
    file: GGUFFile, name: str, num_heads: int | None = None, expert: int | None = None, *, is_flat: bool = False
) -> GGUFEntry:
    """Returns a tensor of the file.

    Args:
        expert: returns that matrix, or bias, of a tensor that holds one for each expert.
        is_flat: returns the matrices that a tensor holds as one, their rows one after another.

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
    kind = TYPES[tensor.kind]
    factor_start = _find_factor(file, name, expert) if isinstance(kind, BlockType) and kind.is_nvfp4 else None
    entry = GGUFEntry(file.path, name, kind, tensor.shape, tensor.start, num_heads, factor_start)
    if expert is not None:
        entry = _take_expert(entry, expert, file)
    if is_flat and len(entry.shape) > 2:
        entry = replace(entry, shape=(math.prod(entry.shape[:-1]), entry.shape[-1]))
    if len(entry.shape) != 2 and isinstance(entry.type, BlockType):
        raise ModelError(f"tensor {name!r} in {file.path.name} is of type {entry.type.name}; only matrices may be quantised")
    if 0 in entry.shape or entry.shape[-1] % entry.type.block_size or entry.start + entry.num_bytes > file.size_bytes:
        raise ModelError(f"{file.path.name} is damaged or cut short at the tensor {name!r}; download or copy it again")
    return entry


def names_beside(file: GGUFFile, name: str) -> tuple[str, ...]:
    """Returns what the factor of a matrix in NVFP4 is called, and that of its inputs, which changes nothing."""
    kind = TYPES.get(file.tensors[name].kind)
    stem = name.removesuffix(".weight")
    return (f"{stem}.scale", f"{stem}.input_scale") if isinstance(kind, BlockType) and kind.is_nvfp4 else ()


def _find_factor(file: GGUFFile, name: str, expert: int | None) -> int | None:
    """Returns where the factor of a matrix lies, one for each expert; None where the file has none."""
    stored = names_beside(file, name)[0]
    if stored not in file.tensors:
        return None
    entry, count = find_entry(file, stored), 1 if expert is None else file.tensors[name].shape[0]
    if entry.type != TYPES[0] or entry.shape != (count,):
        raise ModelError(f"tensor {stored!r} in {file.path.name} must be {count} numbers of type F32; convert the model again")
    return entry.start + 4 * (expert or 0)


def _take_expert(entry: GGUFEntry, number: int, file: GGUFFile) -> GGUFEntry:
    if len(entry.shape) != (2 if entry.name.endswith(".bias") else 3) or number >= entry.shape[0]:
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
