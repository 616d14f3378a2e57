"""From bytes to a checked request object. What is wrong is said without repeating what was sent."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from cloister.server.errors import invalid
from cloister.server.fields import REFUSED, Refused, refuse_unsupported
from cloister.types.errors import InvalidRequestError

Body = TypeVar("Body", bound=BaseModel)

MAX_MISTAKES: Final = 1000

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
    """Returns the fields of a body as a request object.

    Raises:
        InvalidRequestError: they are no such object.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        if error.error_count() > MAX_MISTAKES:  # all are written out to see the first
            raise invalid("The body has too many mistakes to name one; check it against the documentation.") from None
        first = error.errors(include_url=False, include_input=False)[0]
        raise _explain(first, kind, body) from None
    except UnicodeError:
        raise invalid("The body must be Unicode text without lone surrogates.", code="invalid_json") from None


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


def _explain(details: ErrorDetails, kind: type[BaseModel], body: Mapping[str, Any]) -> InvalidRequestError:
    known = set(_field_names(kind))
    location, problem, context = details["loc"], details["type"], details.get("ctx", {})
    if problem == "extra_forbidden":
        return _unknown_field(location, known, body)
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


def _unknown_field(location: tuple[int | str, ...], known: set[str], body: Mapping[str, Any]) -> InvalidRequestError:
    """Says where the field stands and what it may have meant to be, since its name is the client's own words."""
    name = str(location[-1])
    parent = _path(location[:-1], known) if len(location) > 1 else "the body"
    where = f" (field {list(body).index(name) + 1} of the body)" if len(location) == 1 else ""
    near = difflib.get_close_matches(name[:64], sorted(known), n=1)
    hint = f"; did you mean `{near[0]}`?" if near else "; leave it out."
    return invalid(f"There is an unknown field in {parent}{where}{hint}", code="unknown_parameter")


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
    for name, field in kind.model_fields.items():
        yield name
        for inner in _models_in(field.annotation):
            yield from _field_names(inner)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
