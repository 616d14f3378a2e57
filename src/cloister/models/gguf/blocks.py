"""The block types of GGUF, taken apart into codes, scales and offsets with one value for each group.

A row is a run of blocks, each with the numbers of 32 or 256 consecutive weights (llama.cpp's ggml-common.h has the layouts).
Every step is arranged as in the reference, so `GroupedTensor.dequantize` equals it in every bit. Codes of 5 and 6 bits travel
in bytes. Where no code below 0 is meant, bytes are moved up by 128, so that 128 is the zero of every 8-bit type here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

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
    """

    name: str
    block_size: int
    block_bytes: int
    bits: int
    group_size: int
    zero: int
    unpack: Callable[[Bytes], Parts]


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
}
"""By the format's number for the type."""

NAMES_OF_OTHERS: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""For messages."""
