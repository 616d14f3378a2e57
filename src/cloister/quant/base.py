"""The base of quantization formats: a matrix in, codes and scales out. Nothing here knows a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cloister.backends.tensors import Activations, GroupedTensor, QuantizedTensor, choose_rotation, rotate_blocks
from cloister.types.errors import ConfigError
from cloister.types.registry import Registry
from cloister.types.threat import ThreatProfile

FloatArray: TypeAlias = npt.NDArray[np.float32]
KVDtype: TypeAlias = Literal["bfloat16", "int8", "int4"]

THREAT = ThreatProfile(row="paging, continuous batching, chunked prefill, TP, SP", residue="none of its own: weights only")
"""A number format changes weights and what a KV slot holds; blocks are wiped as in any format."""

_LARGEST = 127
_CHUNK = 1 << 18  # numbers at once: a chunk and what is made of it stay in a core's own cache


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What may be chosen about a format.

    Attributes:
        group_size: inputs that share a scale; None for the format's own.
        activations: what meets the codes; None for the format's own.
        rotates: inputs that are rounded, and the weights that they meet, are rotated (`backends.tensors.rotate_blocks`).
    """

    group_size: int | None = None
    activations: Activations | None = None
    rotates: bool = True

    def rotation_of(self, num_inputs: int) -> int:
        """Returns the block that a matrix's inputs are rotated in; inputs in bfloat16 have no need of it."""
        return choose_rotation(num_inputs) if self.rotates and self.activations != "bfloat16" else 0


def read_activations(value: str | None) -> Activations | None:
    """Returns what a person said of activations (ConfigError lists what there is)."""
    known: dict[str | None, Activations | None] = {None: None, "int8": "int8", "bfloat16": "bfloat16"}
    if value not in known:
        raise ConfigError(f"activations are int8 or bfloat16, not {value!r}", param="activations")
    return known[value]


@dataclass(frozen=True, slots=True)
class NumberFormat(ABC):
    """A way to write a weight matrix in few bits.

    Attributes:
        name: its name in `FORMATS`.
        kv_dtype: what it wants the KV cache to hold.
        smooths_keys: whether keys should be smoothed before they are written in few bits (`smooth_attention`).
        wants_calibration: whether rounding to nearest loses so much of small models that text should choose the codes.
        options: what it was made with.
    """

    name: ClassVar[str]
    kv_dtype: ClassVar[KVDtype] = "bfloat16"
    smooths_keys: ClassVar[bool] = False
    wants_calibration: ClassVar[bool] = True
    options: FormatOptions

    @abstractmethod
    def quantize(self, weight: npt.NDArray[Any], importance: FloatArray | None = None) -> QuantizedTensor:
        """Writes a projection in this format.

        Args:
            weight: [out, in], float32, float16 or bfloat16.
            importance: [in] what a squared error of a weight costs, such as the mean square of its input, rotated where the
                format rotates; None for 1.
        """

    def quantize_vocabulary(self, weight: npt.NDArray[Any]) -> GroupedTensor:
        """Writes an embedding or a head [vocab, hidden]: 8 bits and one scale per token in every format."""
        return quantize_rows(weight, self.options)


class FormatFactory(Protocol):
    """Makes a format.

    Raises:
        ConfigError: an option is not one that the format has.
    """

    def __call__(self, options: FormatOptions) -> NumberFormat: ...


FORMATS: Registry[FormatFactory] = Registry("number format")
"""Formats by name; to leave weights as they are is no format."""


def without_rotation(number_format: NumberFormat) -> NumberFormat:
    """Returns the same format with weights and inputs as they are."""
    return FORMATS.get(number_format.name)(replace(number_format.options, rotates=False))


def choose_group_size(value: int | None, default: int, allowed: tuple[int, ...], name: str) -> int:
    """Returns a group size that a format has (ConfigError lists those)."""
    if value is not None and value not in allowed:
        known = ", ".join(str(size) for size in allowed) or "none to choose"
        raise ConfigError(f"the number format {name} has group sizes {known}, not {value}", param="group_size")
    return default if value is None else value


def fit_group_size(num_inputs: int, group_size: int, multiple: int) -> int | None:
    """Returns the greatest group size, at most `group_size` and a multiple of `multiple`, that divides the inputs."""
    sizes = range(group_size // multiple * multiple, 0, -multiple)
    return next((size for size in sizes if num_inputs % size == 0), None)


def row_chunks(weight: npt.NDArray[Any], rotation: int = 0) -> Iterator[tuple[slice, FloatArray]]:
    """Yields a matrix in float32, rotated, some rows at a time, so that no second copy of it is ever held."""
    num_rows = max(1, _CHUNK // weight.shape[1])
    for start in range(0, weight.shape[0], num_rows):
        chunk = np.asarray(weight[start : start + num_rows], dtype=np.float32)
        yield slice(start, start + num_rows), rotate_blocks(chunk, rotation)


def to_columns(rows: FloatArray, group_size: int) -> FloatArray:
    """Returns rows [num_rows, in] as [group_size, num_rows * in / group_size]: a group is a column, and whole vectors of
    groups are computed side by side."""
    return np.ascontiguousarray(rows.reshape(-1, group_size).T)


def from_columns(columns: npt.NDArray[np.uint8], num_rows: int) -> npt.NDArray[np.uint8]:
    """Undoes `to_columns` for codes."""
    return np.ascontiguousarray(columns.T).reshape(num_rows, -1)


def reciprocal(values: FloatArray) -> FloatArray:
    """Returns 1 / values, and 0 for 0."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)


def quantize_rows(weight: npt.NDArray[Any], options: FormatOptions) -> GroupedTensor:
    """Returns 8-bit codes of a matrix [out, in] with one scale per output, its greatest magnitude over 127."""
    num_out, num_in = weight.shape
    rotation = options.rotation_of(num_in)
    codes, scales = np.empty((num_out, num_in), np.uint8), np.empty((num_out, 1), np.float32)
    for rows, chunk in row_chunks(weight, rotation):
        scales[rows] = np.abs(chunk).max(1, keepdims=True) / np.float32(_LARGEST)
        levels = chunk * reciprocal(scales[rows])
        codes[rows] = np.clip(np.rint(levels, out=levels), -_LARGEST, _LARGEST, out=levels) + np.float32(128)
    activations = options.activations or "int8"
    return GroupedTensor(codes, scales, None, None, 8, num_in, activations, rotation=rotation)
