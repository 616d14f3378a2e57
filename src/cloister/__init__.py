"""Cloister: a language-model server that people with secrets can trust."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.api import LLM, AsyncLLM, Completion, CompletionOutput
    from cloister.types.errors import CloisterError
    from cloister.types.request import BeamSearch, Grammar, GrammarKind, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearch",
    "CloisterError",
    "Completion",
    "CompletionOutput",
    "Grammar",
    "GrammarKind",
    "SamplingParams",
    "__version__",
]

_HOME = {
    "BeamSearch": "cloister.types.request",
    "LLM": "cloister.api",
    "AsyncLLM": "cloister.api",
    "Completion": "cloister.api",
    "CompletionOutput": "cloister.api",
    "CloisterError": "cloister.types.errors",
    "Grammar": "cloister.types.request",
    "GrammarKind": "cloister.types.request",
    "SamplingParams": "cloister.types.request",
}


def __getattr__(name: str) -> object:
    # lazy: importing a package of a lower layer must not load those above
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
