"""The structured-output constraint of a request."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

COMPILE_TIMEOUT_S: Final = 5.0
"""Timeout for compiling a grammar. After it, its requests fail with the reason, and its compiling thread is abandoned and
replaced."""


class GrammarKind(StrEnum):
    """The notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, weakref=True):
    """The grammar that the complete text of an answer must match.

    Attributes:
        kind: the notation of `source`.
        source: a JSON schema as JSON; nothing, for any JSON object; a regular expression (Rust's dialect: no look-around, no
            back references) that matches the whole answer; a JSON list of the strings to choose from; or a context-free
            grammar in Lark's notation, whose rule `start` is the answer.
    """

    kind: GrammarKind
    source: str = ""

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Grammar({self.kind.value})"
