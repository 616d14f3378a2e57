"""Keeps what was made of a GGUF file's vocabulary, so that the next start reads it instead of making it again.

SentencePiece's merges follow from two million places where a vocabulary of 262,000 pieces can be cut, 2 s of work for each
process.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

_FORMAT: Final = 1
"""Raise it when the same metadata comes to another tokenizer: files of the old number are then not used."""
_LEAST_BYTES: Final = 1 << 20
_MOST_FILES: Final = 8
_SUFFIX: Final = ".tokenizer"


class TokenizerRecord(msgspec.Struct, frozen=True):
    """What `text.source.TextSource` says of a tokenizer.

    Attributes:
        head: tokenizer.json beside its vocabulary.
        config: tokenizer_config.json.
        content: all of tokenizer.json, JSON.
    """

    head: dict[str, Any]
    config: dict[str, Any]
    content: bytes


class TokenizerStore:
    """Tokenizers in files that only this user may read; the eight that were used last stay.

    Args:
        directory: made when the first one is saved.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self, identity: str) -> TokenizerRecord | None:
        """Returns the one that was saved under `identity`; None when there is none that is whole and of this format."""
        path = self._path(identity)
        try:
            digest, _, encoded = path.read_bytes().partition(b"\n")
            if hashlib.sha256(encoded).hexdigest().encode() != digest:
                return None
            os.utime(path)
            return msgspec.msgpack.decode(encoded, type=TokenizerRecord)
        except (OSError, ValueError):
            return None

    def save(self, identity: str, made: TokenizerRecord) -> bool:
        """Writes one; returns False when it is too small to be worth it, or there is no room or no right to write."""
        if len(made.content) < _LEAST_BYTES:
            return False
        encoded, path = msgspec.msgpack.encode(made), self._path(identity)
        scratch = path.with_suffix(f".{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(hashlib.sha256(encoded).hexdigest().encode() + b"\n")
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
            scratch.replace(path)
            others = sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
            for old in others[:-_MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
        return True

    def _path(self, identity: str) -> Path:
        name = hashlib.sha256(f"{_FORMAT}\0{identity}".encode()).hexdigest()[:32]
        return self._directory / f"{name}{_SUFFIX}"
