"""Keeps packed models in files, so that a second start reads them as they are instead of packing anew.

A file is read into huge pages rather than mapped: file mappings have 4 KiB pages, which cost 5% of the bandwidth that decoding
lives on. Reading from the page cache takes about 0.2 s a gigabyte.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cloister.backends.native.memory import ByteArray, reserve
from cloister.backends.native.model import PackedModel
from cloister.backends.native.packing import LAYOUT, PackedKind, PackedMatrix

_logger = logging.getLogger(__name__)
READER: Final = 4
"""Raise it when reading a checkpoint, or packing it, comes to other bytes: files of the old number are then not used."""
_SHAPE: Final = ("outputs", "inputs", "group", "zero_point", "group_inputs", "rotation", "e2m1")  # of a matrix, after its kind
MOST_BYTES: Final = 64 << 30
_OURS: Final = re.compile(r"[0-9a-f]{32}\.(packed|[0-9]+)")
_MAGIC: Final = b"cloister packed\n"
_ALIGNMENT: Final = 4096
_LEAST_BYTES: Final = 32 << 20  # a smaller model is packed in less time than it takes to look for a file
_PIECE_BYTES: Final = 64 << 20

Array = npt.NDArray[Any]


class PackedStore:
    """Packed models, in files that only this user may read.

    Args:
        directory: made when the first model is saved.
        most_bytes: what files may take together. Those that were used longest ago make room for another one.
    """

    def __init__(self, directory: Path, most_bytes: int = MOST_BYTES) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def load(self, identity: str) -> PackedModel | None:
        """Returns the model saved under `identity`; None when there is none that is whole and of this layout."""
        try:
            with self._path(identity).open("rb") as file:
                _use(file.fileno())
                header = _read_header(file.read(len(_MAGIC) + 8), file)
                return None if header is None else _assemble(header, _read_arrays(file.fileno(), header))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, identity: str, model: PackedModel) -> bool:
        """Writes a model; returns False when it is too small to be worth it, or there is no room or no right to write.

        A disk that is full does no harm: nothing of the file stays.
        """
        arrays = dict(_arrays(model))
        if array_bytes(model) < _LEAST_BYTES:
            return False
        path = self._path(identity)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left_behind in self._directory.glob(f"{path.stem}.[0-9]*"):  # by a process that was killed here
                left_behind.unlink(missing_ok=True)
            if not self._make_room(sum(array.nbytes for array in arrays.values()), path):
                return False
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                _use(file.fileno())
                _write(file, arrays, _describe(model))
                file.flush()
                os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
            scratch.replace(path)
        except OSError as error:
            where = self._directory
            _logger.warning("packed weights cannot be kept in %s (%s); every start packs them anew", where, error.strerror)
            return False
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
        return True

    def _make_room(self, num_bytes: int, path: Path) -> bool:
        """Removes files, those used longest ago first, until one of that size may come to `path`; returns whether it may."""
        others = [file for file in self._directory.iterdir() if _OURS.fullmatch(file.name) and file != path]
        if num_bytes > self._most_bytes:
            return False
        room = self._most_bytes - num_bytes - sum(file.stat().st_size for file in others)
        for file in sorted(others, key=lambda file: file.stat().st_mtime_ns):
            if room >= 0:
                break
            size = file.stat().st_size
            if _remove_unused(file):
                room += size
        return room >= 0

    def _path(self, identity: str) -> Path:
        name = hashlib.sha256(f"{LAYOUT} {READER}\0{identity}".encode()).hexdigest()[:32]
        return self._directory / f"{name}.packed"


def array_bytes(model: PackedModel) -> int:
    """Returns the bytes of all arrays of a model."""
    return sum(array.nbytes for _, array in _arrays(model))


def _arrays(model: PackedModel) -> Iterator[tuple[str, Array]]:
    """Yields every array of a model under a name of its own."""
    yield from model.vectors.items()
    for name, matrix in model.matrices.items():
        yield from ((f"{name}.{part}", array) for part, array in matrix.parts.items())


def _use(descriptor: int) -> None:
    """Notes that a file is used now, and keeps others from removing it until it is closed."""
    with suppress(OSError):  # a file system without locks or times
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)


def _remove_unused(file: Path) -> bool:
    """Removes a file unless somebody reads or writes it; returns whether it is gone."""
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        file.unlink(missing_ok=True)
    return True


def _take_room(descriptor: int, num_bytes: int) -> None:
    """Gives a file its size at once, so that a disk without room says so before a gigabyte was written."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot
            raise


def _describe(model: PackedModel) -> dict[str, Any]:
    matrices = {
        name: [int(matrix.kind), *(int(getattr(matrix, field)) for field in _SHAPE)] for name, matrix in model.matrices.items()
    }
    return {"matrices": matrices, "vectors": list(model.vectors)}


def _write(file: Any, arrays: Mapping[str, Array], described: dict[str, Any]) -> None:
    places, at = {}, 0
    for name, array in arrays.items():
        places[name] = (array.dtype.str, array.size, at)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps({"arrays": places, "num_bytes": at, **described}).encode()
    start = -(-(len(_MAGIC) + 8 + len(header)) // _ALIGNMENT) * _ALIGNMENT
    _take_room(file.fileno(), start + at)
    file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
    for name, array in arrays.items():
        file.seek(start + places[name][2])
        file.write(array.reshape(-1).view(np.uint8).data)
    file.truncate(start + at)


def _read_header(beginning: bytes, file: Any) -> dict[str, Any] | None:
    if not beginning.startswith(_MAGIC):
        return None
    length = int.from_bytes(beginning[len(_MAGIC) :], "little")
    header: dict[str, Any] = json.loads(file.read(length))
    header["start"] = -(-(len(beginning) + length) // _ALIGNMENT) * _ALIGNMENT
    whole = header["start"] + header["num_bytes"] == os.fstat(file.fileno()).st_size
    return header if whole else None


def _read_arrays(descriptor: int, header: Mapping[str, Any]) -> dict[str, Array]:
    memory = reserve(header["num_bytes"])
    starts = range(0, header["num_bytes"], _PIECE_BYTES)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda at: _read_piece(descriptor, memory[at : at + _PIECE_BYTES], header["start"] + at), starts))
    found = {
        name: memory[at : at + size * np.dtype(kind).itemsize].view(kind) for name, (kind, size, at) in header["arrays"].items()
    }
    if any(found[name].size != size for name, (_, size, _) in header["arrays"].items()):
        raise ValueError("an array ends beyond the file")
    return found


def _read_piece(descriptor: int, target: ByteArray, offset: int) -> None:
    done = 0
    while done < target.nbytes:
        count = os.preadv(descriptor, [target[done:].data], offset + done)
        if count == 0:
            raise ValueError("the file was cut short")
        done += count


def _assemble(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> PackedModel:
    parts: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, array in arrays.items():
        name, _, part = key.rpartition(".")
        parts[name][part] = array

    def matrix(name: str, described: list[int]) -> PackedMatrix:
        kind, outputs, inputs, group, zero_point, group_inputs, rotation, e2m1 = described
        shape = outputs, inputs, group, zero_point
        packed = PackedMatrix(PackedKind(kind), *shape, bool(group_inputs), rotation, bool(e2m1), parts[name])
        packed.bind()  # refuses parts that are shorter than the shape asks for
        return packed

    model = PackedModel(
        matrices={name: matrix(name, described) for name, described in header["matrices"].items()},
        vectors={name: arrays[name] for name in header["vectors"]},
    )
    if len(dict(_arrays(model))) != len(arrays):
        raise ValueError("an array belongs to nothing")
    return model
