"""Grammars in the notation of llguidance, the library that follows them."""

from __future__ import annotations

import json
from typing import Final

from llguidance import LLMatcher, LLParserLimits

from cloister.types.grammar import Grammar, GrammarKind

WHITESPACE: Final = r"[ ]|\n[ ]{0,32}"
"""What may stand once between the parts of a JSON text. Without a bound, a model can write spaces until it is cut off."""

LIMITS: Final = LLParserLimits(max_lexer_states=30_000, max_grammar_size=300_000, verbose_errors=False)
"""Work of the library in one piece: it gives up by itself, after 20 ms of one mask or so. A state takes 1 to 2 KB."""


def write_source(grammar: Grammar) -> str:
    """Returns a grammar for the library, which says later whether it can be followed.

    Raises:
        ValueError: it is no JSON, where it has to be.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _of_schema(grammar.source)
        case GrammarKind.JSON_OBJECT:
            return _of_schema('{"type": "object"}')
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)


def _of_schema(schema: str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
