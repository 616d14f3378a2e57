"""The log as static files (C2SP tlog-tiles): hash tiles, entry bundles, and a reader over a copy of them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloister.trust.transparency.merkle import (
    HASH_BYTES,
    Nodes,
    hash_children,
    hash_leaf,
    make_root,
    prove_consistency,
    prove_inclusion,
)
from cloister.trust.transparency.note import Checkpoint, Note, PublicKey, open_checkpoint
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.types.errors import ConfigError

HEIGHT = 8
WIDTH = 1 << HEIGHT
MAX_ENTRY_BYTES = 65_535
ENTRIES = -1
"""The level of entry bundles; tiles of hashes have levels from 0."""

_PATH = re.compile(r"tile/(entries|0|[1-9]|[1-5][0-9]|6[0-3])/((?:x[0-9]{3}/){0,4}[0-9]{3})(?:\.p/([1-9][0-9]{0,2}))?\Z")


@dataclass(frozen=True)
class Tile:
    """The name of a tile or of an entry bundle.

    Attributes:
        level: its height in the tree in steps of 8, or ENTRIES.
        index: index of the tile in its level, from 0.
        width: hashes or entries in it, 1 to 256; below 256 it is partial.
    """

    level: int
    index: int
    width: int = WIDTH

    @property
    def path(self) -> str:
        """Its path relative to the log."""
        digits = str(self.index)
        digits = digits.zfill(-(-len(digits) // 3) * 3)
        groups = [digits[at : at + 3] for at in range(0, len(digits), 3)]
        name = "/".join([*(f"x{group}" for group in groups[:-1]), groups[-1]])
        kind = "entries" if self.level == ENTRIES else self.level
        return f"tile/{kind}/{name}" + (f".p/{self.width}" if self.width < WIDTH else "")

    @property
    def whole(self) -> Tile:
        """Returns the full tile of a partial one."""
        return replace(self, width=WIDTH)

    @classmethod
    def parse(cls, path: str) -> Tile | None:
        """Parses a path; returns None if it is not the canonical path of a tile."""
        match = _PATH.match(path)
        if not match:
            return None
        kind, name, width = match.groups()
        tile = cls(
            ENTRIES if kind == "entries" else int(kind), int(name.replace("x", "").replace("/", "")), int(width or WIDTH)
        )
        return tile if tile.path == path else None


Read = Callable[[Tile], bytes]
"""Returns the content of a tile, or raises TransparencyError."""


def tile_at(level: int, index: int, size: int) -> Tile:
    """Returns the tile with this index in a tree of `size` leaves, with its width there."""
    count = size >> (HEIGHT * max(level, 0))
    return Tile(level, index, min(WIDTH, count - index * WIDTH))


def bundles_between(begin: int, end: int, size: int) -> Iterator[Tile]:
    """Returns the entry bundles with the entries [begin, end) of a tree of `size` leaves."""
    if begin < end:
        for index in range(begin // WIDTH, (end - 1) // WIDTH + 1):
            yield tile_at(ENTRIES, index, size)


def tile_nodes(read: Read, size: int) -> Nodes:
    """The nodes of a tree of `size` leaves, from its tiles alone."""

    def node(level: int, index: int) -> bytes:
        row, height = divmod(level, HEIGHT)
        begin, count = index << height, 1 << height
        tile = tile_at(row, begin // WIDTH, size)
        data = read(tile)
        if len(data) != tile.width * HASH_BYTES:
            raise TransparencyError(Reason.MALFORMED, f"the log's {tile.path} has a wrong length")
        offset = begin % WIDTH * HASH_BYTES
        return _fold([data[at : at + HASH_BYTES] for at in range(offset, offset + count * HASH_BYTES, HASH_BYTES)])

    return node


def grow(read: Read, size: int, leaves: Sequence[bytes]) -> dict[Tile, bytes]:
    """Returns the hash tiles that are new or change when leaves are added to a tree of `size` leaves.

    Args:
        read: returns the tiles of the current tree.
        size: its number of leaves.
        leaves: hashes of the leaves to add.
    """
    tiles: dict[Tile, bytes] = {}
    row, hashes = 0, list(leaves)
    while hashes:
        count = size >> (HEIGHT * row)
        kept = count % WIDTH
        data = (read(tile_at(row, count // WIDTH, size)) if kept else b"") + b"".join(hashes)
        hashes = []
        for number, at in enumerate(range(0, len(data), WIDTH * HASH_BYTES), start=count // WIDTH):
            part = data[at : at + WIDTH * HASH_BYTES]
            tile = Tile(row, number, len(part) // HASH_BYTES)
            tiles[tile] = part
            if tile.width == WIDTH:
                hashes.append(_fold([part[at : at + HASH_BYTES] for at in range(0, len(part), HASH_BYTES)]))
        row += 1
    return tiles


def pack_entries(entries: Sequence[bytes]) -> bytes:
    """Returns an entry bundle: each entry preceded by its length as 16 bits, big-endian.

    Raises:
        TransparencyError: an entry is too long for that.
    """
    for entry in entries:
        if len(entry) > MAX_ENTRY_BYTES:
            raise TransparencyError(Reason.TOO_LARGE, f"an entry has {len(entry):,} bytes; {MAX_ENTRY_BYTES:,} are the most")
    return b"".join(struct.pack(">H", len(entry)) + entry for entry in entries)


def unpack_entries(data: bytes, width: int) -> list[bytes]:
    """Reads an entry bundle of `width` entries.

    Raises:
        TransparencyError: it has fewer or more, or ends early.
    """
    entries: list[bytes] = []
    at = 0
    while at + 2 <= len(data) and len(entries) <= width:
        (length,) = struct.unpack_from(">H", data, at)
        entries.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    if at != len(data) or len(entries) != width:
        raise TransparencyError(Reason.MALFORMED, f"an entry bundle of the log does not have {width} whole entries")
    return entries


def cut(tile: Tile, whole: bytes) -> bytes:
    """Returns the partial tile that is a prefix of a wider one."""
    if tile.level == ENTRIES:
        at = 0
        for _ in range(tile.width):
            at += 2 + struct.unpack_from(">H", whole, at)[0]
        return whole[:at]
    return whole[: tile.width * HASH_BYTES]


def _fold(hashes: list[bytes]) -> bytes:
    while len(hashes) > 1:
        hashes = [hash_children(hashes[at], hashes[at + 1]) for at in range(0, len(hashes), 2)]
    return hashes[0]


# Reads a log's directory: checkpoint, entries and proofs. Needs only a copy of the files, no secret key.


CHECKPOINT = "checkpoint"
_MANIFEST = re.compile(r"manifest/[0-9a-f]{64}\Z")


class LogReader:
    """A log on disk.

    Attributes:
        directory: directory of its files.
        key: the log's own verifier key; its name is the log's origin.
    """

    def __init__(self, directory: Path, key: PublicKey) -> None:
        self.directory = directory
        self.key = key

    def checkpoint(self) -> tuple[Checkpoint, Note]:
        """The newest published checkpoint.

        Raises:
            ConfigError: there is none.
            TransparencyError: it is not of this log.
        """
        try:
            text = (self.directory / CHECKPOINT).read_text()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"no log at {self.directory}; make one with: cloister log init") from None
        return open_checkpoint(text, self.key)

    def root(self, size: int) -> bytes:
        """The root of the first `size` leaves, computed from the tiles."""
        return make_root(tile_nodes(self.read, size), size)

    def prove_inclusion(self, index: int, size: int) -> tuple[bytes, ...]:
        """The inclusion proof of a leaf in the tree of the first `size` leaves."""
        return prove_inclusion(tile_nodes(self.read, size), index, size)

    def prove_consistency(self, old: int, new: int) -> tuple[bytes, ...]:
        """The proof that the first `new` leaves begin with the first `old`."""
        return prove_consistency(tile_nodes(self.read, new), old, new)

    def entries(self, begin: int, end: int, size: int) -> list[bytes]:
        """The entries [begin, end) of a tree of `size` leaves, each checked against its hash in the tree.

        Raises:
            TransparencyError: an entry was changed on disk.
        """
        found: list[bytes] = []
        for bundle in bundles_between(begin, end, size):
            start = bundle.index * WIDTH
            entries = unpack_entries(self.read(bundle), bundle.width)
            if b"".join(map(hash_leaf, entries)) != self.read(tile_at(0, bundle.index, size)):
                raise TransparencyError(
                    Reason.NOT_INCLUDED, f"{bundle.path} of the log is not what the tree has; it was changed"
                )
            found.extend(entries[max(begin - start, 0) : end - start])
        return found

    def read(self, tile: Tile) -> bytes:
        """The content of a tile, cut from a wider one if the partial one is gone.

        Raises:
            TransparencyError: it is missing.
        """
        data = _find(self.directory, tile)
        if data is None:
            raise TransparencyError(Reason.MALFORMED, f"{tile.path} is missing from the log")
        return data

    def resource(self, path: str) -> tuple[bytes, str] | None:
        """See `read_resource`."""
        return read_resource(self.directory, path)


def read_resource(directory: Path, path: str) -> tuple[bytes, str] | None:
    """Returns the content to serve for a path below a log's URL, and its media type; None if there is none.

    Only valid log file names are ever opened, whatever else is in its directory.
    """
    if path == CHECKPOINT:
        data, media_type = _open(directory, path), "text/plain; charset=utf-8"
    elif _MANIFEST.match(path):
        data, media_type = _open(directory, path), "application/json"
    else:
        tile = Tile.parse(path)
        data, media_type = (_find(directory, tile) if tile else None), "application/octet-stream"
    return None if data is None else (data, media_type)


def _find(directory: Path, tile: Tile) -> bytes | None:
    data = _open(directory, tile.path)
    if data is None and tile.width < WIDTH:
        whole = _open(directory, tile.whole.path)
        return None if whole is None else cut(tile, whole)
    return data


def _open(directory: Path, path: str) -> bytes | None:
    try:
        return (directory / path).read_bytes()
    except OSError:
        return None
