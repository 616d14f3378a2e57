"""The log's writer: appends entries, then signs and publishes a checkpoint.

The order of writes matters: tiles first, each complete and on disk, the checkpoint last. An interruption leaves tiles that no
checkpoint covers, which the next append overwrites. Files of a published tree are only ever rewritten with the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.trust.transparency.files import locked, remove_unfinished, write_whole
from cloister.trust.transparency.merkle import EMPTY_ROOT, hash_leaf, make_root
from cloister.trust.transparency.note import Checkpoint, Kind, Note, PrivateKey
from cloister.trust.transparency.refusal import Reason, TransparencyError
from cloister.trust.transparency.tiles import CHECKPOINT, ENTRIES, WIDTH, LogReader, Tile, grow, pack_entries, tile_nodes
from cloister.types.errors import ConfigError


@dataclass(frozen=True)
class Appended:
    """The result of an append.

    Attributes:
        first: the index of the first entry that was added.
        checkpoint: the published checkpoint.
        note: the same, signed by the log.
    """

    first: int
    checkpoint: Checkpoint
    note: Note


class Log(LogReader):
    """A log and the key that signs for it. Many processes may open it; one at a time appends."""

    def __init__(self, directory: Path, key: PrivateKey) -> None:
        if key.kind is not Kind.NOTE:
            raise ConfigError("a log signs with a key of the kind NOTE; a witness's key cannot be a log's")
        super().__init__(directory, key.public)
        self._private = key

    @classmethod
    def create(cls, directory: Path, key: PrivateKey) -> Log:
        """Creates an empty log.

        Raises:
            ConfigError: the log already exists, or the directory cannot be written.
        """
        log = cls(directory, key)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the log's directory {directory}: {error.strerror}") from None
        with locked(directory):
            if (directory / CHECKPOINT).exists():
                raise ConfigError(f"there is a log at {directory} already; it is never made anew, only added to")
            log._publish(Checkpoint(key.name, 0, EMPTY_ROOT))
        return log

    def append(self, entries: Sequence[bytes]) -> Appended:
        """Adds entries and publishes the checkpoint.

        Raises:
            ConfigError: the disk is full or cannot be written; the log is unchanged.
            TransparencyError: an entry is too long, or the files are not those of the published checkpoint.
        """
        bundles = pack_entries(entries)  # refuses oversized entries before anything is written
        if not bundles:
            raise ValueError("nothing to append")
        with locked(self.directory):
            remove_unfinished(self.directory)
            before, _ = self.checkpoint()
            if self.root(before.size) != before.root:
                raise TransparencyError(Reason.NOT_CONSISTENT, "the log's tiles are not those of its checkpoint; restore them")
            tiles = grow(self.read, before.size, [hash_leaf(entry) for entry in entries])
            size = before.size + len(entries)
            root = make_root(tile_nodes(lambda tile: tiles.get(tile) or self.read(tile), size), size)
            for tile, data in {**self._bundle(before.size, entries), **tiles}.items():
                write_whole(self.directory / tile.path, data)
            checkpoint = Checkpoint(self.key.name, size, root)
            note = self._publish(checkpoint)
            self._prune(before.size, size)
        return Appended(before.size, checkpoint, note)

    def cosigned(self, note: Note) -> None:
        """Publishes the newest checkpoint again, with more signatures.

        Raises:
            TransparencyError: it is not the newest one.
        """
        with locked(self.directory):
            _, newest = self.checkpoint()
            if newest.text != note.text:
                raise TransparencyError(Reason.NOT_CONSISTENT, "the log has grown since this checkpoint was cosigned")
            write_whole(self.directory / CHECKPOINT, str(newest.add(*note.signatures)).encode())

    def keep_manifest(self, data: bytes) -> str:
        """Stores a document that an entry references by SHA-256; returns the digest in hex."""
        digest = hashlib.sha256(data).hexdigest()
        write_whole(self.directory / "manifest" / digest, data)
        return digest

    def _bundle(self, size: int, entries: Sequence[bytes]) -> dict[Tile, bytes]:
        begin = size - size % WIDTH
        every = self.entries(begin, size, size) + list(entries)
        bundles: dict[Tile, bytes] = {}
        for at in range(0, len(every), WIDTH):
            part = every[at : at + WIDTH]
            bundles[Tile(ENTRIES, (begin + at) // WIDTH, len(part))] = pack_entries(part)
        return bundles

    def _publish(self, checkpoint: Checkpoint) -> Note:
        note = Note(str(checkpoint)).sign(self._private)
        write_whole(self.directory / CHECKPOINT, str(note).encode())
        return note

    def _prune(self, old: int, new: int) -> None:
        """Removes partial tiles whose full tile now exists; readers cut them from it."""
        for level in (ENTRIES, *range(8)):
            shift = 8 * max(level, 0)
            for index in range((old >> shift) // WIDTH, (new >> shift) // WIDTH):
                partial = self.directory / f"{Tile(level, index).path}.p"
                with contextlib.suppress(OSError):
                    for file in partial.iterdir():
                        file.unlink()
                    partial.rmdir()
