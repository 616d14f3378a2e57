"""The structured-output constraint of a request."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

COMPILE_TIMEOUT_S: Final = 5.0
"""How long a grammar may take to compile. After that its requests fail with the reason, and the thread that compiles it is
left to itself and replaced."""


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, weakref=True):
    """What the tokens of an answer must spell, from its first byte to its last.

    Attributes:
        kind: what `source` is.
        source: a JSON schema as JSON; nothing, for any JSON object; a regular expression (Rust's dialect: no look-around, no
            back references) that matches the whole answer; a JSON list of the strings to choose from; or a context-free
            grammar in Lark's notation, whose rule `start` is the answer.
    """

    kind: GrammarKind
    source: str = ""

    def __repr__(self) -> str:
        """Shows no content (nothing a user sent is logged)."""
        return f"Grammar({self.kind.value})"
