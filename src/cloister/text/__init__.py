"""Text in and out: tokenizers, chat templates, incremental detokenization, stop strings, tool calls, grammars.

The package imports lazily: stop strings alone load neither the tokenizers library nor jinja2.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.text.chat import ChatTemplate
    from cloister.text.detokenizer import Detokenizer, StopStrings
    from cloister.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopStrings", "Tokenizer"]

_MODULES = {"ChatTemplate": "chat", "Detokenizer": "detokenizer", "StopStrings": "detokenizer", "Tokenizer": "tokenizer"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
