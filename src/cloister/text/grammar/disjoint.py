"""Whether the branches of a `oneOf` exclude each other, as far as that can be seen. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

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
