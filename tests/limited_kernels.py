"""`pytest --kernels avx2`: the native back end as on a processor that has no better instruction set.

It holds in the processes of the tests and in those that they start. This file imports only the standard library:
its text is also the `sitecustomize` module of the processes that are started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MODULE = "cloister.backends.native._native"


class Limiter(MetaPathFinder):
    """Finds the kernels as everybody does, and has them name the instruction set `name` and lesser ones only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._limit(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _limit(self, module: ModuleType) -> None:
        for function in ("kernel_names", "runnable_names"):
            names = getattr(module, function)()  # best first
            if self._name not in names:
                raise ImportError(f"these kernels cannot run as {self._name}; {function} has {', '.join(names)}")
            setattr(module, function, names[names.index(self._name) :].copy)


def limit(name: str) -> None:
    """Limits this process, which must not have imported the kernels yet, and imports them.

    Raises:
        ImportError: this processor does not have that instruction set, or there are no kernels.
    """
    defer(name)
    import_module(MODULE)


def defer(name: str) -> None:
    """Limits this process once it imports the kernels."""
    assert MODULE not in sys.modules
    sys.meta_path.insert(0, Limiter(name))


def limit_children(name: str, folder: Path) -> None:
    """Limits the Python processes that this one starts.

    Args:
        folder: an empty one, for what they import at their start.
    """
    (folder / "sitecustomize.py").write_text(f"{Path(__file__).read_text()}\n\ndefer({name!r})\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
