"""Model loading: Hugging Face directories and GGUF files as data, opened without torch.

Imports lazily: a front needs little of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.models.loading import LoadedModel, load
    from cloister.models.location import embedded_names, locate
    from cloister.models.pooling import read_pooling

__all__ = ["LoadedModel", "embedded_names", "load", "locate", "read_pooling"]

_HOMES = {
    "loading": (
        "LoadedModel",
        "load",
    ),
    "location": (
        "embedded_names",
        "locate",
    ),
    "pooling": ("read_pooling",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
