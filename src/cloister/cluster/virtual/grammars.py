"""Grammars of the requests of a virtual cluster, and what they let follow, without the library that engines follow them with.

Each is written twice: as a client writes it (`types.request.Grammar`), and as a rule whose derivatives by the bytes of an
answer (Brzozowski 1964, "Derivatives of regular expressions") say what may come next. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from cloister.types.request import Grammar, GrammarKind


class AnswerRule:
    """What a text may be. There is one object of each rule, so that they compare by identity."""


@dataclass(frozen=True, eq=False, slots=True)
class _Bytes(AnswerRule):
    allowed: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True)
class _Pair(AnswerRule):
    first: AnswerRule
    then: AnswerRule


@dataclass(frozen=True, eq=False, slots=True)
class _Either(AnswerRule):
    either: frozenset[AnswerRule]


@dataclass(frozen=True, eq=False, slots=True)
class _Named(AnswerRule):
    name: str


NEVER: Final = AnswerRule()
"""No text."""
NOTHING: Final = AnswerRule()
"""The empty text."""
_one_of: Final = cache(_Bytes)
_pair: Final = cache(_Pair)
_either: Final = cache(_Either)
_named: Final = cache(_Named)


def one_of(letters: str) -> AnswerRule:
    """Returns the rule of one of these letters, which are ASCII."""
    return _one_of(frozenset(letters.encode()))


def text(letters: str) -> AnswerRule:
    """Returns the rule of a text."""
    return in_turn(*map(one_of, letters))


def in_turn(*rules: AnswerRule) -> AnswerRule:
    """Returns the rule of texts one after the other."""
    rule = NOTHING
    for first in reversed(rules):
        if NEVER in (first, rule):
            return NEVER
        rule = rule if first is NOTHING else first if rule is NOTHING else _pair(first, rule)
    return rule


def either(*rules: AnswerRule) -> AnswerRule:
    """Returns the rule of any of these."""
    found: set[AnswerRule] = set()
    for rule in rules:
        found |= rule.either if isinstance(rule, _Either) else {rule}
    found -= {NEVER}
    return NEVER if not found else next(iter(found)) if len(found) == 1 else _either(frozenset(found))


def repeated(rule: AnswerRule, least: int, most: int) -> AnswerRule:
    """Returns the rule of `least` to `most` such texts."""
    tail = NOTHING
    for number in range(most, 0, -1):
        tail = in_turn(rule, tail) if number <= least else either(NOTHING, in_turn(rule, tail))
    return tail


@cache
def may_end(rule: AnswerRule) -> bool:
    """Whether the empty text follows the rule."""
    match rule:
        case _Pair(first, then):
            return may_end(first) and may_end(then)
        case _Either(rules):
            return any(may_end(each) for each in rules)
        case _Named(name):
            return may_end(_NAMED[name]())
        case _:
            return rule is NOTHING


@cache
def find_next(rule: AnswerRule) -> frozenset[int]:
    """Returns the bytes with which a text of the rule may begin."""
    match rule:
        case _Bytes(allowed):
            return allowed
        case _Pair(first, then):
            return find_next(first) | (find_next(then) if may_end(first) else frozenset())
        case _Either(rules):
            return frozenset[int]().union(*map(find_next, rules))
        case _Named(name):
            return find_next(_NAMED[name]())
        case _:
            return frozenset()


@cache
def derive(rule: AnswerRule, byte: int) -> AnswerRule:
    """Returns the rule of what may follow a byte."""
    match rule:
        case _Bytes(allowed):
            return NOTHING if byte in allowed else NEVER
        case _Pair(first, then):
            after = in_turn(derive(first, byte), then)
            return either(after, derive(then, byte)) if may_end(first) else after
        case _Either(rules):
            return either(*(derive(each, byte) for each in rules))
        case _Named(name):
            return derive(_NAMED[name](), byte)
        case _:
            return NEVER


def _write_nested() -> AnswerRule:
    inner = _named("nested")
    return either(in_turn(text("("), inner, text(")")), in_turn(text("["), inner, inner, text("]")), one_of("abc"))


_NAMED: Final[Mapping[str, Callable[[], AnswerRule]]] = {"nested": cache(_write_nested)}
"""Rules that have themselves as a part."""


@dataclass(frozen=True, slots=True)
class KnownGrammar:
    """A grammar as a client writes it, and as a rule."""

    kind: GrammarKind
    source: str
    rule: AnswerRule

    def write(self) -> Grammar:
        """Returns the grammar of one request: engines tell grammars apart by the object."""
        return Grammar(self.kind, self.source)


_CHOICES: Final = ("abba", "abacus", "bead", "beaded lace", "a", "face", "faced", "")
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "a": {"enum": ["bad", "bag"]},
        "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 7},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
_GAP: Final = either(NOTHING, text(" "), in_turn(text("\n"), repeated(text(" "), 0, 32)))
"""What may stand between the parts of a JSON text."""


def _part(rule: AnswerRule) -> AnswerRule:
    """Returns the rule of a part of a JSON text and the gap before it."""
    return in_turn(_GAP, rule)


def _write_object() -> AnswerRule:
    word = either(text('"bad"'), text('"bag"'))
    item = either(text("true"), text("false"))
    items = in_turn(_part(item), repeated(in_turn(_part(text(",")), _part(item)), 1, 6))
    parts = (text('"a"'), text(":"), word, text(","), text('"b"'), text(":"), text("["))
    return in_turn(text("{"), *map(_part, parts), items, _part(text("]")), _part(text("}")))


GRAMMARS: Final[Mapping[str, KnownGrammar]] = {
    "number": KnownGrammar(
        GrammarKind.REGEX,
        r"[0-9]{3,20}(\.[0-9]{1,4})?",
        in_turn(
            repeated(one_of("0123456789"), 3, 20),
            either(NOTHING, in_turn(text("."), repeated(one_of("0123456789"), 1, 4))),
        ),
    ),
    "words": KnownGrammar(
        GrammarKind.REGEX,
        "([a-c]{1,5} ){4,9}[a-c]{2,5}",
        in_turn(
            repeated(in_turn(repeated(one_of("abc"), 1, 5), text(" ")), 4, 9),
            repeated(one_of("abc"), 2, 5),
        ),
    ),
    "choice": KnownGrammar(GrammarKind.CHOICE, json.dumps(_CHOICES), either(*map(text, _CHOICES))),
    "object": KnownGrammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA), _write_object()),
    "nested": KnownGrammar(GrammarKind.LARK, 'start: "(" start ")" | "[" start start "]" | /[abc]/', _named("nested")),
}
"""By the names that scenarios have for them."""
