"""Codes packed into 32-bit words, several to a word, the first in the lowest bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]


def unpack_rows(words: npt.NDArray[Any], bits: int) -> Codes:
    """Returns codes [rows, columns * 32 / bits] of words [rows, columns]."""
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)  # bytes of a word lie in order already: safetensors are little-endian
    codes = np.empty((len(words), words.shape[1], 32 // bits), np.uint8)
    halves = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.shape[1], 4)
    codes[:, :, 0::2], codes[:, :, 1::2] = halves & 15, halves >> 4
    return codes.reshape(len(words), -1)


def unpack_columns(words: npt.NDArray[Any], bits: int) -> Codes:
    """Returns codes [columns, rows * 32 / bits] of words [rows, columns] that hold consecutive rows: already transposed."""
    return unpack_rows(np.ascontiguousarray(words.T), bits)


def pack_rows(codes: Codes, bits: int) -> npt.NDArray[np.int32]:
    """Returns words [rows, columns * bits / 32] of codes [rows, columns]; zeros fill the last word."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
    joined = padded if bits == 8 else padded[:, 0::2] | (padded[:, 1::2] << 4)
    return np.ascontiguousarray(joined).view(np.int32)
