"""A datastore of public text on disk: token ids and their suffix array (Manber and Myers 1993).

`tokens.bin`: the ids of all documents, big-endian, so that bytes sort as tokens do; each document is followed by the largest
number. `suffixes.bin`: uint32 positions of all suffixes, ordered by their first `SORTED_TOKENS` tokens. `heads.bin`: for each
id the start of its suffixes in that order, then the end of the last ones. `datastore.json`: `DatastoreHeader`.
"""

from __future__ import annotations

import mmap
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from cloister.types.errors import OUT_OF_MEMORY, ConfigError, MemoryBudgetError, lacks_memory

VERSION: Final = 1
SORTED_TOKENS: Final = 64
HEADER, TOKENS, SUFFIXES, HEADS = "datastore.json", "tokens.bin", "suffixes.bin", "heads.bin"
MAX_PLACES: Final = (1 << 31) - 1
"""Limit on tokens plus ends of documents: ranks of two suffixes fit into one number."""
BUILD = "build it with `cloister datastore build`"


class DatastoreHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a datastore.

    Attributes:
        version: version of the format.
        tokenizer: digest of its tokenizer (`models.generation`).
        token_bytes: bytes of one id: 2 or 4.
        num_ids: all ids are below.
        num_tokens: number of tokens in the text, without ends of documents.
    """

    version: int
    tokenizer: str
    token_bytes: int
    num_ids: int
    num_tokens: int
    num_documents: int


class Datastore:
    """An open datastore. Its files are read into memory: of mapped ones the page cache, and the disk, would show to others
    which pages a lookup touched, and so the tokens that it looked up.

    Args:
        path: its directory.
        tokenizer: digest of the model's tokenizer.
        vocab_size: the model's vocabulary size; larger ids end a continuation.

    Attributes:
        num_bytes: total size of its files.

    Raises:
        ConfigError: it is missing or damaged, or has another tokenizer's ids.
    """

    def __init__(self, path: Path, tokenizer: str, vocab_size: int) -> None:
        self.header = header = _read_header(path)
        if header.tokenizer != tokenizer:
            raise ConfigError(f"the datastore {path} has the token ids of another tokenizer; {BUILD}", param="datastore")
        self._width = header.token_bytes
        self._num_ids = min(header.num_ids, vocab_size)
        self._text = _open(path / TOKENS, (header.num_tokens + header.num_documents) * self._width)
        suffixes, heads = _open(path / SUFFIXES, 4 * header.num_tokens), _open(path / HEADS, 4 * (header.num_ids + 1))
        self._suffixes, self._heads = memoryview(suffixes).cast("I"), memoryview(heads).cast("I")
        starts = np.frombuffer(heads, np.uint32)
        if starts[0] != 0 or starts[-1] != header.num_tokens or (starts[1:] < starts[:-1]).any():
            raise _damaged(path / HEADS)
        self.num_bytes = len(self._text) + len(suffixes) + len(heads)

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """Returns the range of suffixes, in sorted order, that begin with `pattern` (1 to `SORTED_TOKENS` tokens)."""
        if not 0 <= pattern[0] < self._num_ids:
            return 0, 0
        text, width = self._text, self._width
        sought = self._encode(pattern)
        size = len(sought)

        def begin(place: int) -> bytes:
            return text[place * width : place * width + size]

        start, end = self._heads[pattern[0]], self._heads[pattern[0] + 1]
        first = bisect_left(self._suffixes, sought, start, end, key=begin)
        if first == end or begin(self._suffixes[first]) != sought:
            return first, first
        return first, bisect_right(self._suffixes, sought, first, end, key=begin)

    def read(self, start: int, end: int, step: int, skip: int, count: int) -> Continuations:
        """Returns at most `count` tokens after the first `skip` tokens of every `step`-th suffix of a range."""
        width, text = self._width, self._text
        behind, size = skip * width, count * width
        places = [place * width + behind for place in self._suffixes[start:end:step]]
        return Continuations([text[place : place + size] for place in places], width, self._num_ids)

    def _encode(self, pattern: Sequence[int]) -> bytes:
        return b"".join([token.to_bytes(self._width) for token in pattern])


class Continuations:
    """Sorted rows of tokens.

    Args:
        rows: in the datastore's format.
    """

    __slots__ = ("_num_ids", "_rows", "_width")

    def __init__(self, rows: list[bytes], width: int, num_ids: int) -> None:
        self._rows, self._width, self._num_ids = rows, width, num_ids

    def __len__(self) -> int:
        return len(self._rows)

    def split(self, first: int, last: int, depth: int) -> list[tuple[int, int, int]]:
        """Returns (token, from, to) for each token at a depth of the rows in [first, last), which are equal up to that depth.

        Rows whose document has ended are omitted.
        """
        start, end = depth * self._width, (depth + 1) * self._width
        rows, found = self._rows, []
        ends_with = rows[last - 1][start:end]
        while first < last:
            token = rows[first][start:end]
            following = first + 1
            if token == ends_with:
                following = last  # rows are sorted
            else:
                while rows[following][start:end] == token:
                    following += 1
            if token and (number := int.from_bytes(token)) < self._num_ids:
                found.append((number, first, following))
            first = following
        return found


def _read_header(path: Path) -> DatastoreHeader:
    try:
        header = msgspec.json.decode((path / HEADER).read_bytes(), type=DatastoreHeader)
    except OSError:
        raise ConfigError(f"there is no datastore at {path}; {BUILD}", param="datastore") from None
    except msgspec.DecodeError:
        raise _damaged(path / HEADER) from None
    if header.version != VERSION:
        raise ConfigError(
            f"the datastore {path} is of version {header.version}, and this build reads {VERSION}; {BUILD}", param="datastore"
        )
    is_sound = header.token_bytes in (2, 4) and 0 < header.num_ids < 1 << 8 * header.token_bytes
    if not is_sound or header.num_tokens < 1 or header.num_documents < 1:
        raise _damaged(path / HEADER)
    return header


def _open(path: Path, num_bytes: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                raise _damaged(path)
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with memoryview(memory) as view:
                num_read = 0
                while got := file.readinto(view[num_read:]):
                    num_read += got
    except OSError as error:
        if lacks_memory(error):
            raise MemoryBudgetError(f"the datastore's {path.name} cannot be read: {OUT_OF_MEMORY}") from None
        raise _damaged(path) from None
    if num_read != num_bytes:
        raise _damaged(path)
    return memory


def _damaged(path: Path) -> ConfigError:
    return ConfigError(f"the datastore's file {path} is missing or damaged; {BUILD}", param="datastore")


def write_datastore(path: Path, documents: Iterable[Sequence[int]], *, num_ids: int, tokenizer: str) -> DatastoreHeader:
    """Writes a datastore of public text; needs about 40 bytes of memory for each token.

    Args:
        path: directory; replaces the files of an earlier datastore.
        documents: the token ids of each, all below `num_ids`.
        tokenizer: digest of their tokenizer.

    Raises:
        ConfigError: the text is empty or too large.
    """
    width = 2 if num_ids < 1 << 16 else 4
    end = (1 << 8 * width) - 1
    text, num_documents = array("I"), 0
    for document in documents:
        if document:
            text.extend(document)
            text.append(end)
            num_documents += 1
        if len(text) > MAX_PLACES:
            raise ConfigError(f"a datastore holds {MAX_PLACES} tokens at most; give less text", param="text")
    if not num_documents:
        raise ConfigError("the text has no tokens; give files with text in them", param="text")
    tokens = np.frombuffer(text, np.uint32)
    order = sort_suffixes(tokens, bits=8 * width)
    order = order[: len(order) - num_documents]  # ends of documents sort last
    header = DatastoreHeader(
        version=VERSION,
        tokenizer=tokenizer,
        token_bytes=width,
        num_ids=num_ids,
        num_tokens=len(order),
        num_documents=num_documents,
    )
    path.mkdir(parents=True, exist_ok=True)
    (path / HEADER).unlink(missing_ok=True)  # without it there is no datastore, so an interrupted write leaves no mixed one
    _write(path / TOKENS, tokens.astype(f">u{width}").tobytes())
    _write(path / SUFFIXES, order.astype("<u4").tobytes())
    heads = np.searchsorted(tokens[order], np.arange(num_ids + 1, dtype=np.uint32))
    _write(path / HEADS, heads.astype("<u4").tobytes())
    _write(path / HEADER, msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n")
    return header


def _write(path: Path, content: bytes) -> None:
    """Replaces the old file, which a server may have mapped, by a new one."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.write_bytes(content)
    scratch.replace(path)


def sort_suffixes(tokens: npt.NDArray[np.uint32], *, bits: int, depth: int = SORTED_TOKENS) -> npt.NDArray[np.uint32]:
    """Returns the positions of all suffixes, sorted by their first `depth` tokens, ties in text order.

    Prefix doubling (Karp, Miller and Rosenberg 1972): the pair of two ranks by k tokens is a rank by 2 k.

    Args:
        tokens: [num_tokens], each below 2 ** bits; a suffix that ends sorts before longer ones.
        depth: a power of two.
    """
    num_sorted = 64 // bits
    keys = np.zeros(len(tokens), np.uint64)
    for place in range(num_sorted):
        keys |= _behind(tokens, place) << np.uint64(64 - bits * (place + 1))
    while True:
        order = np.argsort(keys, kind="stable").astype(np.uint32)
        if num_sorted >= depth:
            return order
        in_order = keys[order]
        ranks = np.empty(len(keys), np.uint64)
        ranks[order] = np.cumsum(np.append(True, in_order[1:] != in_order[:-1]))
        keys = ranks << np.uint64(32) | _behind(ranks, num_sorted)
        num_sorted *= 2


def _behind(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.uint64]:
    """Returns for each position the value `count` positions later, 0 beyond the end."""
    shifted = np.zeros(len(values), np.uint64)
    shifted[: max(0, len(values) - count)] = values[count:]
    return shifted
