"""What the processes of one role load as code: each is given what those before it were, or nothing.

The starter makes an engine again hours after a node was measured, and it imports its modules from files that may have changed
since. So the first process of a role records the digest of each module that it loads, and later ones compare: each file before
its code runs, and each library that the process maps when it is closed. The record is in memory that the starter shares with
the process while that is being loaded.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import source_from_cache
from types import CodeType, ModuleType
from typing import Final

RECORD_BYTES: Final = 4 * 2**20
"""Room for some 30,000 files; a process that loads more is refused."""
_HEAD: Final = struct.Struct("<QQ")
"""Bytes that are used behind it, and whether the process was closed: then it has loaded all that its role needs."""
_DIGEST_BYTES: Final = 32


class ChangedCodeError(ImportError):
    """A file of code is not what an earlier process of this role loaded; nothing of it was run."""


class LoadedCode:
    """The files of code that one process has loaded, by their paths. The starter makes it, and the process fills it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, RECORD_BYTES)

    @property
    def is_complete(self) -> bool:
        """Whether the process was closed."""
        return bool(_HEAD.unpack_from(self._memory)[1])

    def note(self, path: str, digest: bytes) -> None:
        """Adds a file.

        Raises:
            ChangedCodeError: there are too many.
        """
        used, is_complete = _HEAD.unpack_from(self._memory)
        name = os.fsencode(path)
        entry = digest + struct.pack("<I", len(name)) + name
        start = _HEAD.size + used
        if start + len(entry) > RECORD_BYTES:
            raise ChangedCodeError("this process loads more files of code than can be compared; use a smaller installation")
        self._memory[start : start + len(entry)] = entry
        _HEAD.pack_into(self._memory, 0, used + len(entry), is_complete)  # last, as the process may be killed at any time

    def complete(self) -> None:
        """Notes that the process loads no more, and takes the record from it."""
        _HEAD.pack_into(self._memory, 0, _HEAD.unpack_from(self._memory)[0], 1)
        self.close()

    def close(self) -> None:
        """Takes the record from this process."""
        self._memory.close()

    def read(self) -> dict[str, bytes]:
        """Returns the digest of each file."""
        end = _HEAD.size + min(_HEAD.unpack_from(self._memory)[0], RECORD_BYTES - _HEAD.size)
        at, found = _HEAD.size, {}
        while at + _DIGEST_BYTES + 4 <= end:
            digest = self._memory[at : at + _DIGEST_BYTES]
            (size,) = struct.unpack_from("<I", self._memory, at + _DIGEST_BYTES)
            at += _DIGEST_BYTES + 4
            found[os.fsdecode(self._memory[at : at + size])] = digest
            at += size
        return found


class CodeOfRole:
    """What the processes of a role have loaded so far; in the starter."""

    def __init__(self) -> None:
        self._records: list[LoadedCode] = []
        self._known: dict[str, bytes] = {}
        self._is_complete = False

    def begin(self) -> tuple[LoadedCode, Mapping[str, bytes], bool]:
        """Returns what the next process needs to compare (`compare_loads`)."""
        for record in self._records:
            self._known = record.read() | self._known  # what was loaded first counts
            self._is_complete |= record.is_complete
        for ended in self._records[:-1]:
            ended.close()
        self._records = [*self._records[-1:], LoadedCode()]
        return self._records[-1], self._known, self._is_complete

    def close(self, own: LoadedCode) -> None:
        """Takes all records but its own from a process that was made."""
        for record in self._records:
            if record is not own:
                record.close()


class _Comparison:
    """The files that this process may load."""

    def __init__(self, record: LoadedCode, known: Mapping[str, bytes], *, is_complete: bool) -> None:
        self._record, self._known, self._is_complete = record, known, is_complete

    def take(self, path: str, content: bytes) -> None:
        """Raises ChangedCodeError if code differs from what was loaded first, or, once that was all, is new."""
        path = os.path.realpath(path)
        digest, known = hashlib.sha256(content).digest(), self._known.get(path)
        if known != digest and (known is not None or self._is_complete):
            what = "was changed" if known is not None else "is new"
            raise ChangedCodeError(f"{path} {what} since this node was started; start the node again")
        if known is None:
            self._record.note(path, digest)

    def expect(self, path: str, read: Callable[[SourceFileLoader, str], bytes], loader: SourceFileLoader) -> None:
        """Notes the source of what was loaded in its compiled form: a later process may have to compile it."""
        real = os.path.realpath(path)
        if real not in self._known and not self._is_complete:
            self._record.note(real, hashlib.sha256(read(loader, path)).digest())

    def take_library(self, path: str) -> None:
        """As `take`, for a file that the loader of the system maps."""
        with open(path, "rb") as file:
            self.take(path, file.read())

    def end(self, mapped: Sequence[str]) -> None:
        """Compares the libraries that this process has mapped, and ends the record."""
        for path in mapped:
            self.take_library(path)
        self._record.complete()


_comparison: list[_Comparison] = []


def compare_loads(record: LoadedCode, known: Mapping[str, bytes], *, is_complete: bool) -> None:
    """From here on, a module of this process is run only if it is what earlier processes of its role loaded.

    Args:
        record: takes what none of them has loaded.
        known: digests by path.
        is_complete: one of them has loaded all that the role needs, so what is not known is refused.
    """
    comparison = _Comparison(record, known, is_complete=is_complete)
    _comparison[:] = [comparison]
    read, create = SourceFileLoader.get_data, ExtensionFileLoader.create_module

    def get_data(loader: SourceFileLoader, path: str) -> bytes:
        content = read(loader, path)
        if path.endswith(".pyc"):
            try:
                comparison.take(path, content)
            except ChangedCodeError as error:  # another program has compiled it since; its source is compared
                raise OSError("it was compiled again") from error
            comparison.expect(source_from_cache(path), read, loader)
        elif path.endswith(".py"):
            try:
                comparison.take(path, content)
            except ChangedCodeError as error:
                _report(error)
                raise
        return content

    def refuse(loader: SourcelessFileLoader, _: str) -> CodeType:
        error = ChangedCodeError(f"{loader.path} is compiled code without a source, which no process of a node runs")
        _report(error)
        raise error

    def create_module(loader: ExtensionFileLoader, spec: ModuleSpec) -> ModuleType:
        try:
            comparison.take_library(loader.path)
        except ChangedCodeError as error:
            _report(error)
            raise
        return create(loader, spec)

    SourcelessFileLoader.get_code = refuse  # type: ignore[method-assign, assignment]
    sys.path_hooks[:] = [  # no archives, and no compiled code in the place of a source
        FileFinder.path_hook((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceFileLoader, SOURCE_SUFFIXES))
    ]
    sys.path_importer_cache.clear()
    SourceFileLoader.get_data = get_data  # type: ignore[method-assign, assignment]
    ExtensionFileLoader.create_module = create_module  # type: ignore[method-assign, assignment]


def end_comparison(mapped: Sequence[str]) -> None:
    """Compares the libraries that are mapped, once everything is loaded. Does nothing where nothing is compared.

    Raises:
        ChangedCodeError: one of them is not what an earlier process of the role had.
    """
    while _comparison:
        _comparison.pop().end(mapped)


def _report(error: ChangedCodeError) -> None:
    """Says which file it is; what reports exceptions in a hardened process leaves texts out."""
    sys.stderr.write(f"{error}\n")
