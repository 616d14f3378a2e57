"""Reads the metadata and tensor list of a GGUF file; treats the file as untrusted.

It is here because both `models` and `text` need it. Format, all little-endian: the magic bytes, a version, the number of
tensors and of metadata entries; entries (key, type, value); tensors (name, sizes, type, offset); padding; data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from cloister.types.errors import ModelError, describe_read_error

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_HEADER_BYTES: Final = 100_000_000
_MAX_ENTRIES: Final = 100_000
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_STRING, _ARRAY = 8, 9
_OF_BYTES = (0, 1)
_NUMBERS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_LENGTH: Final = struct.Struct("<Q")
_WORD: Final = struct.Struct("<I")

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array in the metadata. It is decoded on demand: a vocabulary has 10^5 items.

    Attributes:
        kind: the format's number for the type of an item.
        raw: the items as they are in the file.
    """

    kind: int
    num_items: int
    raw: bytes

    def strings(self) -> list[str]:
        """Returns the items of an array of strings.

        Raises:
            ValueError: they are not strings, or not UTF-8.
        """
        if self.kind != _STRING:
            raise ValueError("not an array of strings")
        items, place = [], 0
        for _ in range(self.num_items):
            start = place + 8
            place = start + _LENGTH.unpack_from(self.raw, place)[0]
            items.append(self.raw[start:place].decode())
        return items

    def find(self, texts: Collection[str]) -> list[tuple[int, str]]:
        """Returns where some texts are among the items of an array of strings, by their numbers. Much quicker than to decode
        all of them.

        Raises:
            ValueError: they are not strings.
        """
        if self.kind != _STRING:
            raise ValueError("not an array of strings")
        known = {_LENGTH.pack(len(data := text.encode())) + data: text for text in texts}
        sizes = {len(data) - 8 for data in known}
        raw, unpack = self.raw, _LENGTH.unpack_from
        found, place = [], 0
        for number in range(self.num_items):
            start = place
            size = unpack(raw, start)[0]
            place = start + 8 + size
            if size in sizes and (text := known.get(raw[start:place])) is not None:
                found.append((number, text))
        return found

    def numbers(self) -> tuple[Any, ...]:
        """Returns the items of an array of numbers.

        Raises:
            ValueError: they are not numbers.
        """
        if self.kind not in _NUMBERS:
            raise ValueError("not an array of numbers")
        return struct.unpack(f"<{self.num_items}{_NUMBERS[self.kind]}", self.raw)

    def as_bytes(self) -> bytes:
        """Returns the items of an array of bytes, with a sign or without.

        Raises:
            ValueError: they are no bytes.
        """
        if self.kind not in _OF_BYTES:
            raise ValueError("not an array of bytes")
        return self.raw


GGUFValue: TypeAlias = int | float | bool | str | GGUFArray


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry in the list of tensors.

    Attributes:
        shape: outermost dimension first, as in numpy (the file has the reverse order).
        kind: the format's number for the type of its blocks.
        start: offset of its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file.

    Attributes:
        metadata: key -> value.
        tensors: name -> entry; a start may still be outside the file.
        size_bytes: of the whole file.
    """

    path: Path
    metadata: Mapping[str, GGUFValue]
    tensors: Mapping[str, GGUFTensor]
    size_bytes: int

    def get(self, key: str, kind: type[T]) -> T | None:
        """Returns a single value, None if it is absent.

        Raises:
            ModelError: it has another type.
        """
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise ModelError(f"{key!r} in {self.path.name} must be of type {kind.__name__}", param=key)
        return value

    def strings(self, key: str) -> list[str] | None:
        """Returns an array of strings, None if it is absent.

        Raises:
            ModelError: it is something else.
        """
        return self._array(key, GGUFArray.strings)

    def find_strings(self, key: str, texts: Collection[str]) -> list[tuple[int, str]]:
        """Returns the numbers of the items of an array of strings that are one of `texts`; none if it is absent.

        Raises:
            ModelError: it is something else.
        """
        return self._array(key, lambda array: array.find(texts)) or []

    def numbers(self, key: str) -> list[Any] | None:
        """Returns an array of numbers, None if it is absent.

        Raises:
            ModelError: it is something else.
        """
        return self._array(key, lambda array: list(array.numbers()))

    def _array(self, key: str, decode: Any) -> list[Any] | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        try:
            return list(decode(value))
        except (AttributeError, ValueError) as error:
            raise ModelError(f"{key!r} in {self.path.name} cannot be read ({error}); download the file again") from None


def is_gguf(path: Path) -> bool:
    """Whether a path is a file with the GGUF magic bytes."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GGUFFile:
    """Reads everything before the data (about 0.1 s for a vocabulary of 150,000), once for a file that does not change.

    Raises:
        ModelError: the file is missing, cannot be read, is no GGUF file of version 2 or 3, or is damaged or cut short.
        MemoryBudgetError: there is no memory to map it.
    """
    try:
        found = path.stat()
        return _read_header(path, (found.st_size, found.st_mtime_ns, found.st_ino))
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}; check the path") from None
    except OSError as error:
        raise describe_read_error(path.name, error) from None
    except (ValueError, struct.error):
        raise ModelError(f"{path.name} is damaged or cut short, or is no GGUF file; download or copy it again") from None


@lru_cache(maxsize=1)  # a start asks three times: for the model, its tokenizer and its pooling
def _read_header(path: Path, version: tuple[int, int, int]) -> GGUFFile:
    """Reads a header.

    Args:
        version: size, time and inode of the file.
    """
    size = version[0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as header:
        return _Reader(header, path).read_file(size)


class _Reader:
    """Parses a header sequentially. Reading beyond its end raises ValueError or struct.error."""

    def __init__(self, header: mmap.mmap, path: Path) -> None:
        self._header, self._path = header, path
        self._end, self._place = len(header), 0

    def read_file(self, size_bytes: int) -> GGUFFile:
        if self._take(4) != MAGIC:
            raise ValueError
        self._check_version(self._word())
        num_tensors, num_entries = self._length(), self._length()
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise ValueError
        metadata = self._unique(self._entry() for _ in range(num_entries))
        tensors = self._unique(self._tensor() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError
        start = -(-self._place // alignment) * alignment
        moved = {name: GGUFTensor(entry.shape, entry.kind, start + entry.start) for name, entry in tensors.items()}
        return GGUFFile(self._path, metadata, moved, size_bytes)

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ModelError(f"{self._path.name} is a big-endian GGUF file; get the little-endian one")
        raise ModelError(
            f"{self._path.name} is GGUF version {version}; versions 2 and 3 are supported: convert the model again"
        )

    @staticmethod
    def _unique(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError
            found[name] = value
        return found

    def _entry(self) -> tuple[str, GGUFValue]:
        return self._string(), self._value(self._word())

    def _value(self, kind: int) -> GGUFValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._word(), self._length())
        size = struct.calcsize(_code(kind))
        value: int | float | bool = struct.unpack(f"<{_code(kind)}", self._take(size))[0]
        return value

    def _array(self, kind: int, num_items: int) -> GGUFArray:
        """The format allows arrays of arrays, but no known file has one."""
        start = self._place
        if kind == _STRING:
            self._skip_strings(num_items)
        else:
            self._take(num_items * struct.calcsize(_code(kind)))
        return GGUFArray(kind, num_items, self._header[start : self._place])

    def _skip_strings(self, num_items: int) -> None:
        header, place, end, unpack = self._header, self._place, self._end, _LENGTH.unpack_from
        for _ in range(num_items):
            place += 8 + unpack(header, place)[0]
            if place > end:
                raise ValueError
        self._place = place

    def _tensor(self) -> tuple[str, GGUFTensor]:
        name, num_dimensions = self._string(), self._word()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError
        sizes = [self._length() for _ in range(num_dimensions)]
        return name, GGUFTensor(tuple(reversed(sizes)), self._word(), self._length())

    def _string(self) -> str:
        return self._take(self._length()).decode()

    def _word(self) -> int:
        value: int = _WORD.unpack(self._take(4))[0]
        return value

    def _length(self) -> int:
        value: int = _LENGTH.unpack(self._take(8))[0]
        return value

    def _take(self, size: int) -> bytes:
        start = self._place
        if size > self._end - start:
            raise ValueError
        self._place = start + size
        return self._header[start : self._place]


def _code(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError
    return _NUMBERS[kind]
