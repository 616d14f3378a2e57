"""A log's directory, read: checkpoint, entries and proofs. Whoever has a copy of the files can do this; no key is needed."""

from __future__ import annotations

import re
from pathlib import Path

from cloister.privacy.transparency.checkpoint import Checkpoint, open_checkpoint
from cloister.privacy.transparency.merkle import hash_leaf, make_root, prove_consistency, prove_inclusion
from cloister.privacy.transparency.note import Note, PublicKey
from cloister.privacy.transparency.refusal import Reason, TransparencyError
from cloister.privacy.transparency.tiles import WIDTH, Tile, bundles_between, cut, tile_at, tile_nodes, unpack_entries
from cloister.types.errors import ConfigError

CHECKPOINT = "checkpoint"
_MANIFEST = re.compile(r"manifest/[0-9a-f]{64}\Z")


class LogReader:
    """A log on disk.

    Attributes:
        directory: where its files lie.
        key: the log's own verifier key; its name is the log's origin.
    """

    def __init__(self, directory: Path, key: PublicKey) -> None:
        self.directory = directory
        self.key = key

    def checkpoint(self) -> tuple[Checkpoint, Note]:
        """The newest published checkpoint.

        Raises:
            ConfigError: there is none here.
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
            TransparencyError: it is not there.
        """
        data = _find(self.directory, tile)
        if data is None:
            raise TransparencyError(Reason.MALFORMED, f"{tile.path} is missing from the log")
        return data

    def resource(self, path: str) -> tuple[bytes, str] | None:
        """See `read_resource`."""
        return read_resource(self.directory, path)


def read_resource(directory: Path, path: str) -> tuple[bytes, str] | None:
    """What a server gives for a path below a log's URL, and its media type; None if there is no such thing.

    Only names of a log's own forms are ever opened, whatever else lies in its directory.
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
