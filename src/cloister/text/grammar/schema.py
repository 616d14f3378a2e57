"""JSON schemas (draft 2020-12) from clients: the supported keywords, and limits on size.

Nothing is ignored in silence: what a schema demands is either enforced on every answer, or refused by name. Names that are
not keywords are the client's own words and are not repeated; a place in a schema is told by keywords and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import combinations, islice
from typing import Any, Final
from urllib.parse import unquote

from cloister.types.errors import InvalidRequestError

# Whether the branches of a `oneOf` are provably disjoint. Pure.


Resolve = Callable[[str], Any]

_MAX_REFERENCES = 16
_MAX_BRANCHES = 64


def are_disjoint(branches: list[Any], resolve: Resolve) -> bool:
    """True if no value fits two of the schemas: by their types, by their constants, or by a required property that differs.

    That is what a discriminated union looks like. False only means that it could not be seen.
    """
    if len(branches) > _MAX_BRANCHES:
        return False
    return all(_exclude(one, other, resolve) for one, other in combinations(branches, 2))


def _exclude(one: Any, other: Any, resolve: Resolve) -> bool:
    one, other = _target(one, resolve), _target(other, resolve)
    if one is False or other is False:
        return True
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    types, other_types = _types(one), _types(other)
    if types is not None and other_types is not None and not types & other_types:
        return True
    return types == other_types == {"object"} and _differ_in_a_property(one, other, resolve)


def _differ_in_a_property(one: Mapping[str, Any], other: Mapping[str, Any], resolve: Resolve) -> bool:
    properties, other_properties = one.get("properties"), other.get("properties")
    if not isinstance(properties, Mapping) or not isinstance(other_properties, Mapping):
        return False
    shared = _names(one.get("required")) & _names(other.get("required"))
    pairs = [(properties.get(name), other_properties.get(name)) for name in shared]
    return any(_constants_differ(_target(a, resolve), _target(b, resolve)) for a, b in pairs)


def _constants_differ(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    values, other_values = _values(one), _values(other)
    return values is not None and other_values is not None and not values & other_values


def _target(schema: Any, resolve: Resolve) -> Any:
    """Follows references; what stands beside one only makes it narrower."""
    for _ in range(_MAX_REFERENCES):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            return schema
        schema = resolve(schema["$ref"])
    return None


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema is bound to, as JSON; None if it is bound to none, or to lists and objects."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(isinstance(value, list | Mapping) for value in values):
        return None
    return {_key(value) for value in values}


def _key(value: Any) -> str:
    """1 and 1.0 are one value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a schema is bound to; None if it says nothing. Whole numbers are numbers."""
    names = schema.get("type")
    found = {names} if isinstance(names, str) else _names(names)
    return {"number" if name == "integer" else name for name in found} or None


def _names(value: Any) -> set[str]:
    """The strings of a list. What a reference leads to may not have been checked yet, and can be anything."""
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


_VALUES: Final = frozenset(("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
"""Keywords whose numbers must be met exactly."""
MAX_CHARS: Final = 65_536
"""Of a schema written as JSON."""
MAX_DEPTH: Final = 32
"""Schemas inside one another."""
MAX_SCHEMAS: Final = 4000
MAX_PROPERTIES: Final = 1000
"""Of all objects together: what compiling takes grows with their square."""
MAX_VALUES: Final = 5000
"""Of all enumerations together."""
TOO_LONG: Final = (
    f"is too large: a schema may have {MAX_CHARS} characters of JSON and {MAX_PROPERTIES} properties; "
    "leave out what is not needed, such as descriptions"
)
MAX_PATTERN_CHARS: Final = 4_096
MAX_MULTIPLE: Final = 20_000
"""Product of all multipleOf: a number that is to be a multiple of both 997 and 991 takes 988,027 states."""

MAX_PATTERNS_TOGETHER: Final = 8
"""Patterns and formats that one text has to match at once: what finding out whether one can takes doubles with each, and was
minutes for 18."""

_ONE: Final = frozenset({"items", "additionalProperties", "additionalItems"})
"""Keywords that hold a schema."""
_SEVERAL: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords that hold a list of schemas."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold schemas by name."""
_PLAIN: Final = frozenset({
    "type", "const", "enum", "$ref", "$anchor", "required", "minProperties", "maxProperties", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
})  # fmt: skip
_ANNOTATIONS: Final = frozenset({
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "discriminator", "contentEncoding", "contentMediaType", "propertyOrdering",
})  # fmt: skip
"""They say something to readers, and nothing about what is valid (2020-12 Validation, sections 8 and 9)."""
_REFUSED: Final = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "contentSchema", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "nullable",
    "id",
})  # fmt: skip
_FORMATS: Final = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY: Final = f"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_YEAR: Final = "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])"

Schema = Mapping[str, Any] | bool


def check_schema(schema: object, param: str) -> Any:
    """Returns a schema as it is compiled: `oneOf` whose branches exclude each other has become `anyOf`.

    Args:
        param: the field of the request that holds it, for error messages.

    Raises:
        InvalidRequestError: it has a keyword that is not enforced here, is no schema, or is too large; says which and where.
    """
    checked = _Walk(schema, param).check(schema, "", 0)
    try:
        num_patterns = _Places(checked).count_patterns()
    except (OverflowError, RecursionError):
        raise InvalidRequestError(
            f"`{param}` is too large: its references, `allOf`, `anyOf` and `patternProperties` combine into too much; make it "
            "flatter.",
            param=param,
            code="unsupported_schema",
        ) from None
    if num_patterns > MAX_PATTERNS_TOGETHER:
        raise InvalidRequestError(
            f"`{param}` is too large: a text may have to match {MAX_PATTERNS_TOGETHER} patterns and formats at once; put them "
            "into fewer patterns.",
            param=param,
            code="unsupported_schema",
        )
    return checked


def _find_anchors(root: object) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the schemas that have a name to refer to, and whatever else looks like that."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    left = [root]
    while left:
        match left.pop():
            case dict() as schema:
                if isinstance(name := schema.get("$anchor"), str):
                    found.setdefault(name, []).append(schema)
                left += schema.values()
            case list() as schemas:
                left += schemas
    return found


_MAX_STEPS: Final = 100_000
"""Of counting patterns, which is refused beyond. A step is a schema at a place, or a name or position inside it; so many take
up to 0.4 s."""

_STEPS_OF_A_PAIR: Final = 40
"""Of two patterns of `patternProperties`: the library looks for a name that matches both, whenever it puts schemas together, in
up to 0.3 ms. It was 6 s for 200 patterns."""

_Terms = frozenset[Any]
"""What a value must fit at once: ids of schemas, and alternatives (a frozen set of such sets), of which it fits one."""
_NOTHING: Final[_Terms] = frozenset()


class _Demands:
    """What schemas demand of a value at one place.

    Attributes:
        num_patterns: that the value must match at once if it is a text.
        inside: terms of the values inside it, by the name of a property or the position of an item.
        names: terms of properties that are not in `inside`.
        items: terms of items that are not in `inside`.
        num_kinds: entries of `patternProperties`.
        num_merges: schemas that the library puts together for them.
    """

    def __init__(
        self,
        num_patterns: int,
        inside: Mapping[str | int, _Terms],
        names: _Terms,
        items: _Terms,
        num_kinds: int,
        num_merges: int = 1,
    ) -> None:
        self.num_patterns = num_patterns
        self.num_kinds = num_kinds
        self.num_merges = num_merges
        self.inside = inside
        self.names = names
        self.items = items


class _Places:
    """The places of values that a schema describes, each with the schemas that hold there at once.

    `allOf` and `$ref` put further schemas at a place, and the library merges them: also those inside, by name and position. A
    place is known by its schemas; so a recursive schema has finitely many, and no count depends on where counting began.
    """

    def __init__(self, root: object) -> None:
        self._root = root
        self._anchors = _find_anchors(root)
        self._schemas: dict[int, Mapping[str, Any]] = {}
        self._num_steps = 0

    def count_patterns(self) -> int:
        """Returns how many patterns and formats a text may have to match at once: exactly, or more, never fewer.

        Raises:
            OverflowError: counting takes more than `_MAX_STEPS`.
            RecursionError: the schema is too deep to count.
        """
        left = [self._name(self._root)]
        seen = set(left)
        most = 0
        while left and most <= MAX_PATTERNS_TOGETHER:
            demands = self._read(left.pop(), set())
            most = max(most, demands.num_patterns)
            for terms in {*demands.inside.values(), demands.names, demands.items} - seen:
                seen.add(terms)
                left.append(terms)
        return most

    def _read(self, terms: _Terms, here: set[int]) -> _Demands:
        """Returns what terms demand together, but for the schemas in `here`, which hold anyway; adds the ids of those it reads.

        A schema that leads back to itself at the same place ends there: that it holds twice demands no more.
        """
        self._step(2)
        parts: list[_Demands] = []
        for term in sorted(terms, key=lambda term: not isinstance(term, int)):
            if isinstance(term, int):
                self._read_schema(term, here, parts)
            else:
                parts.append(self._choose([self._read(alternative, set(here)) for alternative in term]))
        return self._add(parts)

    def _read_schema(self, schema_id: int, here: set[int], parts: list[_Demands]) -> None:
        if schema_id in here:
            return
        here.add(schema_id)
        schema = self._schemas[schema_id]
        parts.append(self._read_own(schema))
        for term in self._name(*schema.get("allOf", ()), *self._find_targets(schema)):
            self._read_schema(term, here, parts)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts.append(self._choose([self._read(self._name(branch), set(here)) for branch in schema[keyword]]))

    def _read_own(self, schema: Mapping[str, Any]) -> _Demands:
        """Returns what a schema demands by itself. That a date has real days costs next to nothing, and is not counted."""
        num_patterns = (schema.get("pattern") not in (None, _DAY, _YEAR)) + ("format" in schema)
        by_pattern = _unite({self._name(item) for item in schema.get("patternProperties", {}).values()})
        names = by_pattern | self._name(schema.get("additionalProperties"))
        inside: dict[str | int, _Terms] = {
            name: by_pattern | self._name(item) for name, item in schema.get("properties", {}).items()
        }
        rest = schema.get("items")
        lists = [schema.get("prefixItems", []), rest if isinstance(rest, list) else []]
        items = self._name(schema.get("additionalItems"), None if isinstance(rest, list) else rest)
        for position in range(max(map(len, lists))):
            listed = self._name(*(entries[position] for entries in lists if position < len(entries)))
            inside[position] = listed | items if "additionalItems" in schema else listed
        self._step(1 + len(inside))
        return _Demands(num_patterns, inside, names, items, len(schema.get("patternProperties", ())))

    def _add(self, parts: list[_Demands]) -> _Demands:
        """Returns what all of several demand together."""
        inside: dict[str | int, _Terms] = {}
        for part in parts:
            for key, terms in part.inside.items():
                inside[key] = inside.get(key, _NOTHING) | terms
        for part in parts:
            if part.names or part.items:
                self._step(len(inside))
                for key in inside.keys() - part.inside.keys():
                    inside[key] |= part.names if isinstance(key, str) else part.items
        names = _NOTHING.union(*(part.names for part in parts))
        items = _NOTHING.union(*(part.items for part in parts))
        num_kinds, num_merges = sum(part.num_kinds for part in parts), len(parts)
        for part in parts:
            num_merges = min(num_merges * part.num_merges, _MAX_STEPS)
        self._step(sum(len(part.inside) for part in parts) + num_kinds * (num_kinds - 1) * num_merges * _STEPS_OF_A_PAIR // 2)
        return _Demands(sum(part.num_patterns for part in parts), inside, names, items, num_kinds, num_merges)

    def _choose(self, parts: list[_Demands]) -> _Demands:
        """Returns what one of several demands, whichever it is."""
        names, items = {part.names for part in parts}, {part.items for part in parts}
        inside: dict[str | int, set[_Terms]] = {}
        for part in parts:
            for key, terms in part.inside.items():
                inside.setdefault(key, set(names if isinstance(key, str) else items)).add(terms)
        self._step(sum(len(part.inside) for part in parts) + len(inside) * (len(names) + len(items)))
        return _Demands(
            max(part.num_patterns for part in parts),
            {key: _unite(found) for key, found in inside.items()},
            _unite(names),
            _unite(items),
            max(part.num_kinds for part in parts),
            sum(part.num_merges for part in parts),
        )

    def _name(self, *schemas: object) -> _Terms:
        """Returns the terms of schemas that hold at once. What only refers is what it refers to, so that it is read once."""
        found = set()
        for schema in schemas:
            if isinstance(schema, Mapping):
                while len(schema) == 1 and "$ref" in schema and len(targets := self._find_targets(schema)) == 1:
                    self._step(1)
                    schema = targets[0]
                self._schemas[id(schema)] = schema
                found.add(id(schema))
        return frozenset(found)

    def _find_targets(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Returns what a schema refers to: more than one if a name in `$anchor` was given twice."""
        reference = schema.get("$ref")
        if reference is None:
            return []
        name = unquote(reference.removeprefix("#"))
        target = resolve(self._root, "#" + name if name.startswith("/") else reference)
        return [*self._anchors.get(name, ()), *([target] if isinstance(target, Mapping) else ())]

    def _step(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise OverflowError


def _unite(alternatives: set[_Terms]) -> _Terms:
    """Returns the terms of a value that fits one of several; nothing is the least of them."""
    found = frozenset(alternatives - {_NOTHING})
    return next(iter(found), _NOTHING) if len(found) < 2 else frozenset({found})


def check_schema_size(schema: object, param: str) -> None:
    """Refuses a schema that is longer than `MAX_CHARS` before it is written as JSON. Stops where that is certain.

    Raises:
        InvalidRequestError: it is too long; the message has the limits.
    """
    num_chars, values = 0, [schema]
    while values:
        match values.pop():
            case dict() as entries:
                num_chars += 1 + sum(len(name) + 4 for name in islice(entries, MAX_CHARS))  # brackets, quotes, colons, commas
                values += islice(entries.values(), MAX_CHARS)
            case list() as entries:
                num_chars += 1 + len(entries)
                values += islice(entries, MAX_CHARS)
            case str() as text:
                num_chars += len(text) + 2
            case _:
                num_chars += 1
        if num_chars > MAX_CHARS:
            raise InvalidRequestError(f"`{param}` {TOO_LONG}.", param=param, code="unsupported_schema")


class _Walk:
    """One schema while it is read."""

    def __init__(self, root: object, param: str) -> None:
        self._root = root
        self._param = param
        self._num_schemas = self._num_properties = self._num_values = 0
        self._multiple = 1

    def check(self, schema: object, place: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error(place, "is no schema: it must be an object, true or false")
        self._num_schemas += 1
        if depth > MAX_DEPTH or self._num_schemas > MAX_SCHEMAS:
            raise self._error("", f"is too large: at most {MAX_SCHEMAS} schemas, {MAX_DEPTH} deep, are taken")
        checked: dict[str, Any] = {}
        for position, (keyword, value) in enumerate(schema.items()):
            if keyword in _VALUES and not _is_read_exactly(value):
                raise self._error(place, f"has a number in `{keyword}` that is not enforced exactly; 15 digits are")
            if keyword in _ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            checked[keyword] = self._check_keyword(keyword, value, place, depth, position)
        self._check_least(checked, place)
        return self._without_one_of(_with_real_days(checked))

    def _check_keyword(self, keyword: str, value: object, place: str, depth: int, position: int) -> Any:
        inside = f"{place}.{keyword}" if place else keyword
        if keyword in _ONE and not (keyword == "items" and isinstance(value, list)):
            return self.check(value, inside, depth + 1)
        if keyword in _SEVERAL or keyword == "items":
            return self._check_list(value, inside, depth)
        if keyword in _NAMED:
            return self._check_named(keyword, value, inside, depth)
        if keyword in _PLAIN:
            self._check_plain(keyword, value, inside)
            return value
        if keyword in _REFUSED:
            raise self._error(place, f"has `{keyword}`, which is not enforced here; leave it out{_HINTS.get(keyword, '')}")
        raise self._error(place, f"has an unknown keyword (entry {position + 1}); leave it out")

    def _check_list(self, value: object, place: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._error(place, "must be a list of at least one schema")
        return [self.check(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(value)]

    def _check_named(self, keyword: str, value: object, place: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(place, "must be an object of schemas")
        if keyword in ("properties", "patternProperties"):
            self._num_properties += len(value)
            if self._num_properties > MAX_PROPERTIES:
                raise self._error("", f"is too large: it may have {MAX_PROPERTIES} properties")
        if keyword == "patternProperties":
            for pattern in value:
                self._check_pattern(pattern, place)
        return {name: self.check(item, f"{place}[{i}]", depth + 1) for i, (name, item) in enumerate(value.items())}

    def _check_plain(self, keyword: str, value: object, place: str) -> None:
        match keyword, value:
            case "type", str() | list():
                names = [value] if isinstance(value, str) else value
                if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
                    raise self._error(place, f"must be one or more of: {', '.join(sorted(_TYPES))}")
            case "enum", list() if value:
                self._num_values += len(value)
                if self._num_values > MAX_VALUES:
                    raise self._error("", f"is too large: its enumerations may have {MAX_VALUES} values")
            case "const", _:
                pass
            case "$ref", str():
                if not value.startswith("#"):
                    raise self._error(place, "leads out of the schema; put what it names under `$defs`")
                self._check_reference(value, place)
            case "required", list() if all(isinstance(name, str) for name in value):
                pass
            case "format", str():
                if value not in _FORMATS:
                    raise self._error(
                        place, f"is not enforced here; leave it out, or use one of: {', '.join(sorted(_FORMATS))}"
                    )
            case "pattern", str():
                self._check_pattern(value, place)
            case "$anchor", str():
                pass
            case "multipleOf", int() | float() if not isinstance(value, bool) and value > 0:
                self._multiple *= int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))) * _ten(value)
                if self._multiple > MAX_MULTIPLE:
                    raise self._error(place, f"is too large: all of a schema multiply to {MAX_MULTIPLE} at most")
            case (("minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum"), int() | float()):
                if isinstance(value, bool) or abs(value) >= 2**53:
                    raise self._error(place, "must be a number below 2^53")
            case (("minProperties" | "maxProperties" | "minItems" | "maxItems" | "minLength" | "maxLength"), int()):
                if isinstance(value, bool) or not 0 <= value < 2**31:
                    raise self._error(place, "must be a whole number from 0 to 2^31")
            case _:
                raise self._error(place, "has a value of the wrong kind")

    def _check_pattern(self, pattern: str, place: str) -> None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise self._error(place, f"has a pattern that is too long; it may have {MAX_PATTERN_CHARS} characters")

    def _check_least(self, schema: Mapping[str, Any], place: str) -> None:
        """A name may come twice where names are free, and counts once."""
        is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        if is_open and schema.get("minProperties", 0) > max(1, len(set(schema.get("required", ())))):
            raise self._error(
                place, "has `minProperties` where names are free, which is not enforced here; require some by name"
            )

    def _check_reference(self, reference: str, place: str) -> None:
        seen: set[str] = set()
        while _is_pointer(reference):
            if reference in seen:
                raise self._error(place, "leads back to itself, so that nothing says what fits")
            seen.add(reference)
            found = resolve(self._root, reference)
            if found is None:
                raise self._error(place, "names nothing in the schema")
            further = found.get("$ref") if isinstance(found, Mapping) else None
            reference = further if isinstance(further, str) else ""

    def _without_one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`oneOf` demands that all other branches fail, which is free where they exclude each other."""
        branches = schema.get("oneOf")
        if branches is None or not are_disjoint(branches, lambda reference: resolve(self._root, reference)):
            return schema
        others = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        if "anyOf" not in others:
            return {**others, "anyOf": branches}
        return {**others, "allOf": [*others.get("allOf", []), {"anyOf": branches}]}

    def _error(self, place: str, what: str) -> InvalidRequestError:
        where = f"`{self._param}`, at `{place}`," if place else f"`{self._param}`"
        return InvalidRequestError(f"{where} {what}.", param=self._param, code="unsupported_schema")


_HINTS: Final = {
    "nullable": '; say {"type": [..., "null"]}',
    "dependencies": "; `anyOf` can say the same",
    "dependentRequired": "; `anyOf` can say the same",
    "if": "; `anyOf` can say the same",
}


def _with_real_days(schema: dict[str, Any]) -> dict[str, Any]:
    """The library's dates have a 29th of February in every year; RFC 3339, section 5.7, has it in leap years."""
    if schema.get("format") not in ("date", "date-time"):
        return schema
    return {**schema, "allOf": [*schema.get("allOf", []), {"pattern": _DAY}, {"pattern": _YEAR}]}


def _is_read_exactly(value: object) -> bool:
    """Whether the library reads every number of a JSON value as it is.

    It does so below 2^53, with integers and with floats that one rounding makes: their digits are below 2^53 and their power of
    ten is at least -22 (W. Clinger, "How to Read Floating Point Numbers Accurately").
    """
    values = [value]
    while values:
        match values.pop():
            case list() as items:
                values.extend(items)
            case dict() as items:
                values.extend(items.values())
            case int() | float() as number:
                if not abs(number) < 2**53:
                    return False
                _, digits, exponent = Decimal(repr(number + 0)).as_tuple()
                if not isinstance(exponent, int) or exponent < -22 or int("".join(map(str, digits))) >= 2**53:
                    return False
    return True


def _ten(value: float) -> int:
    """The power of ten that a multiple such as 300 has beside its digits."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return 10 ** min(exponent, 9) if isinstance(exponent, int) and exponent > 0 else 1


def resolve(root: object, reference: str) -> Schema | None:
    """Returns the schema that a JSON pointer (RFC 6901) such as "#/$defs/a" names, or None. Nobody may have checked it."""
    if not _is_pointer(reference):
        return None
    found: Any = root
    for part in _steps(reference):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and len(part) < 10 and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found if isinstance(found, Mapping | bool) else None


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _steps(reference: str) -> Iterator[str]:
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        yield part.replace("~1", "/").replace("~0", "~")
