"""SHA-256 of model files, remembered from one start to the next while a file stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_WORTH_REMEMBERING_BYTES: Final = 64 << 20
_MOST_REMEMBERED: Final = 64


class Digests:
    """Hashes files (hex; about 1 s per 1.5 GB), and large ones only once.

    A file counts as unchanged while its device, inode and size, and the times of its last change of data and of inode are the
    same; the last of these cannot be set back by a user.

    Args:
        path: JSON file of what was hashed before; None remembers nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known = _read(path)

    def of(self, file: Path) -> str:
        """Returns a file's SHA-256 (OSError if it cannot be read)."""
        with file.open("rb") as stream:
            state = os.fstat(stream.fileno())
            key = " ".join(str(n) for n in (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
            if (known := self._known.get(key)) is not None:
                return known
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if state.st_size >= _WORTH_REMEMBERING_BYTES:
            self._remember(key, digest)
        return digest

    def _remember(self, key: str, digest: str) -> None:
        kept = list(self._known.items())[-_MOST_REMEMBERED + 1 :]
        self._known = {**dict(kept), key: digest}
        if self._path is None:
            return
        scratch = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(self._known, file, indent=0)  # which models somebody has is nobody else's business
            scratch.replace(self._path)
        except OSError:  # no room or no right to write: it is hashed again next time
            pass
        finally:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)


def _read(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(digest) for key, digest in known.items()} if isinstance(known, dict) else {}
