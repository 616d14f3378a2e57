"""Measures `code` and `imports`: machine code is copied out of writable files, and no module is read from disk after lockdown.

An unmodified page of a mapped file is shared with the file: writing to a library in place changes the code of every process
that runs it, without a capability and undetected by system-call filters (mmap(2), MAP_PRIVATE).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter
from typing import Final

from cloister.trust.hardening import kernel
from cloister.trust.hardening.loaded_code import ChangedCodeError, end_comparison
from cloister.trust.hardening.measure import Missing, Needs

MADV_POPULATE_WRITE: Final = 23
PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
REMEDY: Final = "run on Linux 5.14 or newer"

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class CodePages:
    """Pages of a file with code, with their mapping's permissions."""

    start: int
    size: int
    rights: int


class Code:
    name = "code"
    stops = "machine code that is rewritten on disk while it runs"

    def apply(self, needs: Needs) -> str:
        spans = list(spans_of_code(kernel.read_text("/proc/self/maps") or ""))
        if not spans:
            raise Missing("the kernel does not say what is mapped", "run on Linux, with /proc mounted")
        for span in spans:
            _own(span)
        return f"{sum(span.size for span in spans) / 2**20:.0f} MiB copied from their files"

    def probe(self) -> str:
        return "can be copied from its files"


def spans_of_code(maps: str) -> Iterator[CodePages]:
    """Yields every private mapping of each file with an executable part, including constants and data.

    Args:
        maps: content of /proc/PID/maps.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    with_code = {(device, inode) for _, rights, _, device, inode, *_ in lines if "x" in rights and inode != "0"}
    for span, rights, _, device, inode, *_ in lines:
        if (device, inode) in with_code and rights[3] == "p" and rights[:3] != "---":
            start, end = (int(edge, 16) for edge in span.split("-"))
            bits = PROT_READ * (rights[0] == "r") | PROT_WRITE * (rights[1] == "w") | PROT_EXEC * (rights[2] == "x")
            yield CodePages(start, end - start, bits)


def mapped_files(maps: str) -> set[str]:
    """Returns the files that are mapped as machine code."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return {line[5] for line in lines if len(line) > 5 and "x" in line[1] and line[5].startswith("/")}


def _own(span: CodePages) -> None:
    """Makes each page private to this process, as a write would, without changing its content.

    Raises:
        Missing: the kernel does not support it.
    """
    at, size = ctypes.c_void_p(span.start), ctypes.c_size_t(span.size)
    done = _libc.mprotect(at, size, span.rights | PROT_READ | PROT_WRITE) == 0
    done = done and _libc.madvise(at, size, MADV_POPULATE_WRITE) == 0
    reason = os.strerror(ctypes.get_errno())
    if _libc.mprotect(at, size, span.rights) != 0 or not done:
        raise Missing(f"code could not be copied from its file ({reason})", REMEDY)


# Measure `imports`: after lockdown no module is read from a file.
#
# So writing to code directories after the start changes nothing in a running process. Modules that are imported on demand must
# be loaded before (`preload`).


CODECS: Final = ("ascii", "latin_1", "utf_8", "utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "idna", "punycode")
"""Text encodings that bodies and headers may use; others are unknown encodings."""

UNUSED: Final = "this"
"""A module of the standard library that nothing imports."""


class Imports:
    name = "imports"
    stops = "code that was changed or added on disk after the start"

    def apply(self, needs: Needs) -> str:
        try:
            end_comparison(sorted(mapped_files(kernel.read_text("/proc/self/maps") or "")))
        except (ChangedCodeError, OSError) as error:
            raise Missing(str(error), "start the node again") from None
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter]  # built-in modules may still be imported
        sys.path_hooks.clear()
        sys.path_importer_cache.clear()
        with contextlib.suppress(ImportError):
            importlib.import_module(UNUSED)
            raise Missing("a module could still be imported", "use CPython")
        return f"{len(sys.modules)} modules are there, no other comes"

    def probe(self) -> str:
        return "can be ended"


def preload(packages: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Imports modules that a request would otherwise import on demand.

    Args:
        packages: everything in them is imported.
        modules: modules that libraries import late; skipped if not installed.
    """
    for name in (*(f"encodings.{codec}" for codec in CODECS), *modules):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in packages:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(found.name)
