"""Memory-mapped safetensors files; the header is parsed here because numpy has no bfloat16.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cloister.types.errors import ModelError, describe_read_error

FLOATS: Mapping[str, npt.DTypeLike] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""Types of tensors that stand for themselves."""

DTYPES: Mapping[str, npt.DTypeLike] = {
    **FLOATS,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
"""And of the parts that quantised matrices are made of."""

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        start: offset of its first byte in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def form(self) -> None:
        """Of a quantised tensor; this is not one."""
        return

    def read(self) -> npt.NDArray[Any]:
        """Returns the tensor, read-only and mapped: its bytes are loaded when touched."""
        dtype = np.dtype(DTYPES[self.dtype])
        num_bytes, before = math.prod(self.shape) * dtype.itemsize, self.start % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:  # `np.memmap` takes several times as long for small tensors
            mapped = mmap.mmap(file.fileno(), before + num_bytes, access=mmap.ACCESS_READ, offset=self.start - before)
        return np.frombuffer(mapped, np.uint8, num_bytes, before).view(dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of one file by name.

    Raises:
        ModelError: the file is missing, unreadable, cut short or not of this format, or a tensor's type is not supported.
        MemoryBudgetError: there is no memory to read it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}
    except FileNotFoundError:
        raise ModelError(f"the model has no file {path.name}; weights must be in safetensors files") from None
    except OSError as error:
        raise describe_read_error(path.name, error) from None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        raise ModelError(f"{path.name} is damaged or cut short; download or copy it again") from None


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes one file, tensors in the order given."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
        end += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that data begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data.cast("B") if tensor.dtype.kind in "fiu" else tensor.tobytes())


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_start: int, file_size: int) -> TensorEntry:
    dtype, shape = fields["dtype"], tuple(int(size) for size in fields["shape"])
    if dtype not in DTYPES:
        raise ModelError(f"tensor {name!r} has the type {dtype}; supported are: {', '.join(DTYPES)}")
    start, end = fields["data_offsets"]
    num_bytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if not 0 <= start <= end <= file_size - data_start or end - start != num_bytes or num_bytes == 0:
        raise ValueError
    return TensorEntry(path, dtype, shape, data_start + start)
