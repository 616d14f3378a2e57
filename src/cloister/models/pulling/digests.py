"""SHA-256 of files that were downloaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cloister.types.errors import ModelError


class DigestMismatchError(ModelError):
    """What came is not the file that was published: the way to it, or its server, is broken or hostile."""

    def __init__(self, what: str, digest: str, sha256: str) -> None:
        super().__init__(
            f"{what} is not the file that was published: its SHA-256 is {digest[:16]}..., not {sha256[:16]}...; nothing was "
            "kept. Look which index or server pip and you ask"
        )


class LengthMismatchError(DigestMismatchError):
    """As its base, seen before the digest could be: what came is longer."""

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
