"""Python processes that lack modules, as if they had never been installed: their children lack them too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

KERNELS = "cloister.backends.native._native"
_HOOK = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Lacking())
"""


def lacking(folder: Path, *names: str) -> Mapping[str, str]:
    """Returns the environment of a process that lacks the modules of these names; it uses the folder."""
    (folder / "sitecustomize.py").write_text(_HOOK.format(names=names))  # site imports it before anything else
    return {**os.environ, "PYTHONPATH": str(folder)}
