"""From bytes to a checked request object. What is wrong is said without repeating what was sent."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from cloister.server.errors import invalid
from cloister.server.fields import REFUSED, Refused, refuse_unsupported
from cloister.server.middleware.ignored import ignored_fields, shown_name
from cloister.types.errors import InvalidRequestError

Body = TypeVar("Body", bound=BaseModel)

MAX_MISTAKES: Final = 1000
MAX_EXACT: Final = 2**53
"""Up to it every whole number is a float of its own."""
UNKNOWN: Final = "extra_forbidden"
NEAR: Final = 0.7
"""How alike a known name has to be to be suggested; 1 is equal."""
_INDEX: Final = re.compile(r"\[\d+\]")

_TYPES: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_attributes_type": "an object",
    "string_pattern_mismatch": "1 to 64 letters, digits, `_`, `-` and `.`",
    "model_type": "an object",
    "none_required": "null or left out",
    "finite_number": "a finite number",
}
_BOUNDS: Final[Mapping[str, str]] = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} entries long",
    "too_long": "at most {max_length} entries long",
    "literal_error": "one of {expected}",
    "union_tag_invalid": "of a `type` among {expected_tags}",
    "union_tag_not_found": "an object with a `type`",
}
_KINDS: Final = frozenset({"union_tag_invalid", "literal_error"})
"""Problems of a `type` that the API may well know and this server does not take, such as an image."""


def parse_body(raw: bytes, kind: type[Body], refused: Mapping[str, Refused] = REFUSED) -> Body:
    """Reads the body of a request.

    Args:
        raw: UTF-8 JSON.
        kind: the request object that it has to be.
        refused: fields that the API has and this server does not.

    Raises:
        InvalidRequestError: it is no JSON, no such object, or asks for something that this server does not have.
    """
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return check_fields(refuse_unsupported(body, refused), kind)


def check_fields(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Returns the fields of a body as a request object; notes unknown ones, unless they are refused
    (`server.middleware.ignored`).

    Raises:
        InvalidRequestError: they are no such object.
    """
    try:
        return _read(body, kind)
    except InvalidRequestError:
        whole = with_whole_numbers(body)
        if whole is body:
            raise
        return _read(whole, kind)


def with_whole_numbers(value: Any) -> Any:
    """Returns a JSON value with 1 for 1.0, which are one number (JSON Schema 2020-12 core, 6.3); itself if it has none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value
    if isinstance(value, list):
        changed = [with_whole_numbers(item) for item in value]
        return value if all(map(operator.is_, changed, value)) else changed
    if isinstance(value, dict):
        walked = {key: with_whole_numbers(item) for key, item in value.items()}
        return value if all(walked[key] is value[key] for key in value) else walked
    return value


def _read(body: Mapping[str, Any], kind: type[Body]) -> Body:
    problems = []
    for extra in (None, "ignore"):
        try:
            read = kind.model_validate(body, extra=extra)
        except ValidationError as error:
            if error.error_count() > MAX_MISTAKES:  # all are written out to see the first
                raise invalid("The body has too many mistakes to name one; check it against the documentation.") from None
            problems = error.errors(include_url=False, include_input=False)
        except UnicodeError:
            raise invalid("The body must be Unicode text without lone surrogates.", code="invalid_json") from None
        else:
            _note(problems, kind)
            return read
        if ignored_fields().is_strict or not any(problem["type"] == UNKNOWN for problem in problems):
            break
    raise _explain(problems[0], kind) from None


def _note(problems: Iterable[ErrorDetails], kind: type[BaseModel]) -> None:
    known = set(_field_names(kind))
    for problem in problems:
        *parents, name = problem["loc"]
        parent = _path(tuple(parents), known) if parents else ""
        path = f"{parent}.{shown_name(str(name))}" if parent else shown_name(str(name))
        ignored_fields().add(_INDEX.sub("[]", path))


def parse_json(raw: bytes) -> object:
    """Reads JSON (RFC 8259): UTF-8, no NaN, no lone surrogates, at most 200 levels deep.

    Raises:
        InvalidRequestError: it is not; the message says where.
    """
    if not raw.strip():
        raise invalid("The body is empty; send a JSON object.", code="invalid_json")
    try:
        # The library would keep short strings for the next body: nothing of a request outlives it.
        return from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _explain(details: ErrorDetails, kind: type[BaseModel]) -> InvalidRequestError:
    known = set(_field_names(kind))
    location, problem, context = details["loc"], details["type"], details.get("ctx", {})
    if problem == UNKNOWN:
        return _unknown_field(location, kind, known)
    path = _path(location, known)
    if problem == "missing":
        return invalid(f"`{path}` is missing; it is required.", path, "missing_required_parameter")
    if problem == "list_type" and path.endswith(("stop", "content", "input", "output", "system")):
        return invalid(f"`{path}` must be a string or a list.", path, "invalid_type")
    if problem in _TYPES:
        return invalid(f"`{path}` must be {_TYPES[problem]}.", path, "invalid_type")
    if problem in _BOUNDS:
        is_kind = problem in _KINDS and (location[-1] == "type" or problem == "union_tag_invalid")
        code = "unsupported_parameter" if is_kind else "invalid_value"
        return invalid(f"`{path}` must be {_BOUNDS[problem].format(**context)}.", path, code)
    return invalid(f"`{path}` has a value that this server does not take; see the documentation.", path, "invalid_value")


def _unknown_field(location: tuple[int | str, ...], kind: type[BaseModel], known: set[str]) -> InvalidRequestError:
    """Names the field, and what it may have meant to be among the fields of the object that it stands in."""
    name = shown_name(str(location[-1]))
    parent = f"`{_path(location[:-1], known)}`" if len(location) > 1 else "the body"
    near = difflib.get_close_matches(name, sorted(_fields_at(location[:-1], kind)), n=1, cutoff=NEAR)
    hint = f"; did you mean `{near[0]}`?" if near else "; leave it out."
    return invalid(f"`{name}` is an unknown field of {parent}{hint}", name, "unknown_parameter")


def _fields_at(location: tuple[int | str, ...], kind: type[BaseModel]) -> set[str]:
    """Returns the names of the fields that the object at a location may have."""
    kinds = {kind}
    for part in location:
        inner = {
            model
            for outer in kinds
            for name, field in _fields_of(outer)
            if name == part
            for model in _models_in(field.annotation)
        }
        kinds = inner or _tagged(kinds, part)
    return {name for one in kinds for name, _ in _fields_of(one)}


def _tagged(kinds: set[type[BaseModel]], tag: int | str) -> set[type[BaseModel]]:
    """Returns those of several kinds whose `type` is the one that a location names; all where it names none."""
    tagged = {
        kind for kind in kinds if (field := kind.model_fields.get("type")) is not None and tag in get_args(field.annotation)
    }
    return tagged or kinds


def _path(location: tuple[int | str, ...], known: set[str]) -> str:
    """Returns a location such as `messages[0].content`, without the keys that the client chose."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in known:
            path += f".{part}" if path else part
    return path or "body"


def _field_names(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in _fields_of(kind):
        yield name
        for inner in _models_in(field.annotation):
            yield from _field_names(inner)


def _fields_of(kind: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields of one object under the names that clients use."""
    for name, field in kind.model_fields.items():
        yield field.alias or name, field


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
