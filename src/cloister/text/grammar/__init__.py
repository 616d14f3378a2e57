"""Structured output: the grammars a client may ask for, compiled and followed token by token.

It imports lazily: a server that never compiles one does not load the library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.text.grammar.checking import check_grammar
    from cloister.text.grammar.compiler import GrammarCompiler
    from cloister.text.grammar.schema import check_schema, check_schema_size

__all__ = ["GrammarCompiler", "check_grammar", "check_schema", "check_schema_size"]

_MODULES = {
    "GrammarCompiler": "compiler",
    "check_grammar": "checking",
    "check_schema": "schema",
    "check_schema_size": "schema",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
