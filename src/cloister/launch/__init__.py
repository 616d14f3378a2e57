"""Assembles the other packages: the only place where they are combined.

Imports are lazy: an engine process, which is started by the name of its entry point, loads nothing that only the front needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.launch.app import build_gate
    from cloister.launch.backend import number_format
    from cloister.launch.backend_choice import NO_QUANT
    from cloister.launch.budget import budget_model
    from cloister.launch.engine import build_engine, build_program, build_scheduler, build_sealed_engine
    from cloister.launch.processes import ENGINE_ENTRY, SEALED_ENGINE_ENTRY
    from cloister.launch.sealed import launch_sealed
    from cloister.launch.serving import serve
    from cloister.launch.settings import Settings, resolve_settings

__all__ = [
    "ENGINE_ENTRY",
    "NO_QUANT",
    "SEALED_ENGINE_ENTRY",
    "Settings",
    "budget_model",
    "build_engine",
    "build_gate",
    "build_program",
    "build_scheduler",
    "build_sealed_engine",
    "launch_sealed",
    "number_format",
    "resolve_settings",
    "serve",
]

_HOME = {
    "ENGINE_ENTRY": "processes",
    "NO_QUANT": "backend_choice",
    "SEALED_ENGINE_ENTRY": "processes",
    "Settings": "settings",
    "budget_model": "budget",
    "build_engine": "engine",
    "build_gate": "app",
    "build_program": "engine",
    "build_scheduler": "engine",
    "build_sealed_engine": "engine",
    "launch_sealed": "sealed",
    "number_format": "backend",
    "resolve_settings": "settings",
    "serve": "serving",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
