"""Measure `imports`: when a process is closed, no module is read from a file any more.

So whoever can write to the directories of the code after the start changes nothing in a process that runs. Modules that code
imports only when it needs them have to be there before (`preload`).
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from importlib.machinery import BuiltinImporter, FrozenImporter
from typing import Final

from cloister.privacy.hardening.measure import Missing, Needs

CODECS: Final = ("ascii", "latin_1", "utf_8", "utf_8_sig", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "idna", "punycode")
"""Text encodings that bodies and headers may ask for; one that is not there is an unknown encoding."""

UNUSED: Final = "this"
"""A module of the standard library that nothing imports."""


class Imports:
    name = "imports"
    stops = "code that was changed or added on disk after the start"

    def apply(self, needs: Needs) -> str:
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter]  # what is compiled into the interpreter may still come
        sys.path_hooks.clear()
        sys.path_importer_cache.clear()
        with contextlib.suppress(ImportError):
            importlib.import_module(UNUSED)
            raise Missing("a module could still be imported", "use CPython")
        return f"{len(sys.modules)} modules are there, no other comes"

    def probe(self) -> str:
        return "can be ended"


def preload(packages: Iterable[str], modules: Iterable[str] = ()) -> None:
    """Imports what would otherwise be imported by the first request that needs it.

    Args:
        packages: everything in them is imported.
        modules: of libraries that import them late; one that is not installed is left out.
    """
    for name in (*(f"encodings.{codec}" for codec in CODECS), *modules):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in packages:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(found.name)
