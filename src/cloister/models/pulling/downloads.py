"""Resumable downloads: partial files, SHA-256 checks, and the progress bar."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from cloister.types.errors import ModelError

# Partial files of interrupted downloads.


_PREFIX: Final = ".partial-"
_MAX_AGE_S: Final = 7 * 24 * 3600.0
"""Age after which the next download removes an abandoned partial file."""


class BrokenDownloadError(ModelError):
    """A download was interrupted; the received part is kept, and the next attempt resumes it."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The version of a remote file, which distinguishes its bytes from those of another version.

    Attributes:
        etag: strong validator (RFC 9110, section 8.8.1), with its quotes.
        num_bytes: length of the whole file.
    """

    etag: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Partial:
    """The downloaded part of one file.

    Attributes:
        path: its first bytes, or all of them.
    """

    path: Path

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def state(self) -> FileState | None:
        """Returns the version of the bytes; None if the server provided too little to resume."""
        try:
            etag, _, length = self._state_path.read_text(encoding="latin-1").partition("\n")
        except OSError:
            return None
        return FileState(etag, int(length)) if length.isdecimal() else None

    def begin(self, state: FileState | None) -> None:
        """Discards the existing bytes, because the next ones belong to another version of the file."""
        self.path.write_bytes(b"")  # first, so that bytes never have the tag of another version
        self._state_path.write_text(f"{state.etag}\n{state.num_bytes}" if state else "", encoding="latin-1")

    def remove(self) -> None:
        """Deletes it."""
        for path in (self.path, self._state_path):
            path.unlink(missing_ok=True)

    @property
    def _state_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.etag")


@dataclass
class PartialDownloads:
    """Partial files of one pull. They outlive it only if a download was interrupted or the process ended.

    Args:
        root: the directory of the store, whose lock is held.
    """

    root: Path
    _used: list[Partial] = field(default_factory=list)

    def of(self, address: str) -> Partial:
        """Returns the partial file of an address, which has no password and no query."""
        digest = hashlib.sha256(address.encode()).hexdigest()[:32]
        self._used.append(Partial(self.root / f"{_PREFIX}{digest}"))
        return self._used[-1]

    def __enter__(self) -> Self:
        for path in self.root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _MAX_AGE_S:
                    path.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        is_kept = kind is not None and (issubclass(kind, BrokenDownloadError) or not issubclass(kind, Exception))
        for partial in self._used:
            if not is_kept or partial.state is None:
                partial.remove()


# SHA-256 checks of downloaded files.


class DigestMismatchError(ModelError):
    """The received file is not the published one: the connection or the server is broken or hostile."""

    def __init__(self, what: str, digest: str, sha256: str) -> None:
        super().__init__(
            f"{what} is not the file that was published: its SHA-256 is {digest[:16]}..., not {sha256[:16]}...; nothing was "
            "kept. Look which index or server pip and you ask"
        )


class LengthMismatchError(DigestMismatchError):
    """Like its base, detected before the digest: the received file is too long."""

    def __init__(self, what: str, most_bytes: int) -> None:
        ModelError.__init__(
            self,
            f"{what} is not the file that was published: it has more bytes than {most_bytes:,}; nothing was kept. Look which "
            "index or server pip and you ask",
        )


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file (hex)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, sha256: str, what: str) -> None:
    """Raises DigestMismatchError for a file that has another digest.

    Args:
        what: names the file in the error.
    """
    digest = digest_of(path)
    if digest != sha256:
        raise DigestMismatchError(what, digest, sha256)


# The progress bar of downloads.


def download_progress(shown: bool, *, transient: bool = False) -> Progress:
    """Returns a display on standard error whose tasks count bytes; a transient one disappears when done."""
    console = Console(stderr=True)
    shown = shown and (console.is_terminal or not transient)  # in a file a transient display leaves an empty line
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, disable=not shown, transient=transient,
    )  # fmt: skip
