"""Validates a client's grammar before anything is computed for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic_core import from_json

from cloister.text.grammar.compiler import LIMITS, write_source
from cloister.text.grammar.schema import MAX_CHARS, TOO_LONG, check_schema
from cloister.types.errors import InvalidRequestError
from cloister.types.request import Grammar, GrammarKind

MAX_SOURCE_CHARS: Final = {
    GrammarKind.JSON_SCHEMA: MAX_CHARS,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: 8_192,
    GrammarKind.CHOICE: 65_536,
    GrammarKind.LARK: 16_384,
}
"""What compiling an expression takes grows with its square: 8 MiB for 8,000 letters, 400 MiB for 60,000."""
MAX_CHOICES: Final = 1000

_DECODER: Final = json.JSONDecoder()
# No space here reaches into another line: a pattern that does takes the square of as many empty lines as a client likes.
_GBNF: Final = re.compile(r"^[^\S\n]*root[^\S\n]*::=", re.MULTILINE)
_CONVERTED: Final = "%llguidance {}"
_DIRECTIVE: Final = re.compile(r"^[^\S\n]*%(?!ignore\b|json\b|regex\b|override\b|extend\b)", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"""
    (?P<text> //[^\n]* | \#[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\])+/ | <[^<>\s]+> | ~[ \t]*[+-]?[0-9] )
    | %(?P<directive> json | regex | llguidance )[ \t\r\n]*
    | (?P<sign> [&~] )
    """,
    re.VERBOSE | re.DOTALL,
)
"""What the signs of a grammar are read by, as the library does from its start on: comments, texts, regular expressions, names
of special tokens and repetitions (`D~4`), in which a sign is none; JSON behind a directive; signs."""
MAX_SIGNS: Final = 8
"""Signs `&` (and) and `~` (not) of a grammar: what compiling their terminals takes doubles with each, and was over 40 s for
16 of them."""
MAX_SCHEMAS_IN_GRAMMAR: Final = 16
_COMPLAINTS: Final[tuple[tuple[str, str], ...]] = (
    ("look-around", "looks around, which is not supported; write what has to be there instead"),
    ("lookarounds", "looks around (as \\b does), which is not supported; write what has to be there instead"),
    ("backreferences", "refers back to a group, which is not supported"),
    (
        "oneOf constraints",
        "has `oneOf` whose branches do not exclude each other visibly; use `anyOf`, or a required constant in each",
    ),
    ("Unsatisfiable", "cannot be satisfied: its demands exclude each other"),
    ("Unable to determine if regex is empty", "has patterns that are too complex together; use fewer of them"),
    ("too big", "is too large; make it smaller"),
    ("too large", "is too large; make it smaller"),
    ("too many", "is too large; make it smaller"),
    ("recursion limit", "is too deep; make it flatter"),
    ("unknown name", "uses a rule that it does not have"),
    ("no tokenizer", "names special tokens, which only the server may write"),
    ("special_token", "names special tokens, which only the server may write"),
)


def check_grammar(grammar: Grammar, param: str) -> Grammar:
    """Returns a client's grammar as it is compiled later: checked, in the notations that are followed here.

    Takes up to a few hundred milliseconds: call it off the event loop. A context-free grammar may be written in llama.cpp's
    notation (GBNF) too, and becomes Lark's.

    Args:
        param: the field of the request that it came in, for error messages.

    Raises:
        InvalidRequestError: it cannot be followed; the message names `param` and what to do, and repeats nothing of it.
    """
    if len(grammar.source) > MAX_SOURCE_CHARS[grammar.kind]:
        is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
        raise _error(param, TOO_LONG if is_schema else f"is too large; it may have {MAX_SOURCE_CHARS[grammar.kind]} characters")
    checked = Grammar(grammar.kind, _CHECKS[grammar.kind](grammar.source, param))
    try:
        source = write_source(checked)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=LIMITS)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # JSON that the library cannot hold, as a number of 400 digits; or a panic, which is no Exception
        raise _error(param, _NAMES[grammar.kind]) from None
    if is_error or any("no tokenizer" in message for message in messages):
        raise _explain(messages[0], grammar.kind, param)
    return checked


def _check_schema(source: str, param: str) -> str:
    schema = check_schema(_read_json(source, param), param)
    if schema is False:
        raise _error(param, "cannot be satisfied: nothing fits false")
    return json.dumps({} if schema is True else schema)


def _check_choice(source: str, param: str) -> str:
    choices = _read_json(source, param)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise _error(param, "must be a list of strings, none of them empty")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise _error(param, f"must have 1 to {MAX_CHOICES} choices")
    return source


def _check_lark(source: str, param: str) -> str:
    if _GBNF.search(source):
        try:
            source = gbnf_to_lark(source).removeprefix(_CONVERTED)
        except Exception:  # the converter has errors of its own, with the client's words in them
            raise _error(param, "is no grammar in llama.cpp's notation that can be converted; write it in Lark's") from None
    if _DIRECTIVE.search(source):
        raise _error(param, "has a directive that is not taken here; of those that begin with %, use %ignore and %json")
    return _check_tokens(source, param)


def _check_tokens(source: str, param: str) -> str:
    """Returns a grammar whose signs are few and whose JSON schemas are checked as those of requests are.

    Their limits are those of the library's work. It reads the same tokens, or none at all: where one that began here does not
    end, it ends with an error.
    """
    parts, at, kept = [], 0, 0
    num_signs = num_schemas = 0
    while found := _TOKEN.search(source, at):
        at = found.end()
        num_signs += found["sign"] is not None
        if num_signs > MAX_SIGNS:
            raise _error(
                param,
                f"is too large: it may have {MAX_SIGNS} of the signs & (and) and ~ (not) outside of texts, regular expressions "
                "and comments; say the same with |",
            )
        if found["directive"] is None:
            continue
        try:
            schema, at = _DECODER.raw_decode(source, at)
        except (ValueError, RecursionError):
            what = "a schema behind it, as a JSON object" if found["directive"] == "json" else "JSON behind it"
            raise _error(param, f"has `%{found['directive']}` without {what}") from None
        if found["directive"] != "json":
            continue
        if not isinstance(schema, dict):
            raise _error(param, "has `%json` without a schema behind it, as a JSON object")
        num_schemas += 1
        if num_schemas > MAX_SCHEMAS_IN_GRAMMAR:
            raise _error(param, f"is too large: it may have {MAX_SCHEMAS_IN_GRAMMAR} schemas behind `%json`")
        parts += [source[kept : found.start()], "%json ", json.dumps(check_schema(schema, param))]
        kept = at
    return "".join([*parts, source[kept:]])


def _check_filled(source: str, param: str) -> str:
    if not source:
        raise _error(param, "is empty")
    return source


_CHECKS: Final[Mapping[GrammarKind, Callable[[str, str], str]]] = {
    GrammarKind.JSON_SCHEMA: _check_schema,
    GrammarKind.JSON_OBJECT: lambda source, param: "",
    GrammarKind.REGEX: _check_filled,
    GrammarKind.CHOICE: _check_choice,
    GrammarKind.LARK: _check_lark,
}
_NAMES: Final = {
    GrammarKind.JSON_SCHEMA: "is a JSON schema that cannot be followed here",
    GrammarKind.JSON_OBJECT: "cannot be followed here",
    GrammarKind.REGEX: "is no regular expression that can be followed here (Rust's dialect)",
    GrammarKind.CHOICE: "cannot be followed here",
    GrammarKind.LARK: "is no grammar that can be followed here (Lark's notation, with a rule `start`)",
}


def _read_json(source: str, param: str) -> Any:
    try:
        return from_json(source, allow_inf_nan=False, cache_strings="none")  # nothing is kept for the next
    except ValueError:
        raise _error(param, "is not valid JSON") from None


def _explain(message: str, kind: GrammarKind, param: str) -> InvalidRequestError:
    """The library repeats the grammar in its messages, so they only choose among ours."""
    found = next((ours for theirs, ours in _COMPLAINTS if theirs in message), _NAMES[kind])
    return _error(param, found)


def _error(param: str, what: str) -> InvalidRequestError:
    code = "unsupported_schema" if param.endswith(("schema", "json")) else "unsupported_grammar"
    return InvalidRequestError(f"`{param}` {what}.", param=param, code=code)
