"""Parses and validates request objects: errors never repeat user input; fields without effect are refused."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.server.errors import invalid
from cloister.types.errors import InvalidRequestError

# Request fields without effect: refused with `--strict-fields`, else dropped and listed in the reply.
#
# Generic clients send settings of other servers (`typical_p`, `enable_thinking`). Requests with one are answered
# without it, and the header `cloister-ignored-fields` lists it.


IGNORED_HEADER: Final = "cloister-ignored-fields"
MAX_NAMED: Final = 16
"""Maximum number of fields listed in the header; further ones are counted."""
UNPRINTABLE: Final = "(unprintable)"
"""Placeholder for a name that the header does not repeat, because it is long or has unusual characters."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(slots=True)
class IgnoredFields:
    """The ignored fields of one request.

    Attributes:
        is_strict: no field may be ignored.
        paths: paths of ignored fields, such as `messages[].cache_control`, each once, in order.
    """

    is_strict: bool = True
    paths: dict[str, None] = field(default_factory=dict)

    def add(self, path: str) -> None:
        """Records a field."""
        self.paths[path] = None

    def header(self) -> str:
        """Returns the value of the header."""
        named = list(self.paths)[:MAX_NAMED]
        rest = len(self.paths) - len(named)
        return ", ".join([*named, *([f"and {rest} more"] if rest else [])])


_current: ContextVar[IgnoredFields] = ContextVar("ignored_fields")


def ignored_fields() -> IgnoredFields:
    """Returns the ignored fields of the current request; without one, no field may be ignored."""
    return _current.get(None) or IgnoredFields()


@contextmanager
def noting(fields: IgnoredFields) -> Iterator[None]:
    """Records ignored fields in `fields` while the block runs, also in threads that it waits for."""
    token = _current.set(fields)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def renamed_fields(rename: Callable[[str], str]) -> Iterator[None]:
    """Rewrites the paths of fields that are recorded while the block runs."""
    fields = ignored_fields()
    before = set(fields.paths)
    try:
        yield
    finally:
        fields.paths = {path if path in before else rename(path): None for path in fields.paths}


def shown_name(name: str) -> str:
    """Returns a field's name as shown in replies: only short names of plain letters, so that it is no content."""
    return name if _NAME.fullmatch(name) else UNPRINTABLE


class IgnoredFieldsMiddleware:
    """Adds the header `cloister-ignored-fields` to replies to requests with ignored fields.

    Args:
        strict: refuse requests with unknown fields instead.
    """

    def __init__(self, app: ASGIApp, *, strict: bool) -> None:
        self._app = app
        self._is_strict = strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = IgnoredFields(self._is_strict)

        async def send_with_fields(message: Message) -> None:
            if message["type"] == "http.response.start" and fields.paths:
                header = (IGNORED_HEADER.encode(), fields.header().encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        with noting(fields):
            await self._app(scope, receive, send_with_fields)


# Request fields of the OpenAI API without effect here: refused unless they have a neutral value. Includes fields of other
# servers.


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused, and its neutral values, which are accepted (null always is).

    Attributes:
        why: half a sentence, after "is refused: ".
    """

    why: str
    harmless: tuple[object, ...] = ()


_TOOLS: Final = "this older form of tool calling is not available; use `tools` and `tool_choice`"
_TEXT: Final = "models here read and write text only"

REFUSED: Final[Mapping[str, Refused]] = {
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none",)),
    "modalities": Refused(_TEXT, (["text"],)),
    "audio": Refused(_TEXT),
    "prediction": Refused("predicted outputs are not available"),
    "web_search_options": Refused("this server does not search the web"),
    "chat_template": Refused("the template is the model's own; a client's would run here as a program"),
    "verbosity": Refused("models here have no verbosity levels", ("medium",)),
    "moderation": Refused("this server does not moderate"),
    "store": Refused("nothing is kept here, so there is nothing to store in", (False,)),
    "service_tier": Refused("a request's class comes from its API key", ("auto", "default")),
}
CHAT_REFUSED: Final[Mapping[str, Refused]] = {
    **REFUSED,
    "documents_prefix": Refused("documents of a chat follow its system message; write the prefix there"),
}


def refuse_unsupported(body: Mapping[str, Any], refused: Mapping[str, Refused] = REFUSED) -> dict[str, Any]:
    """Returns the body without the fields of `refused`.

    Raises:
        InvalidRequestError: one of them has another value than a neutral one.
    """
    for name, value in body.items():
        entry = refused.get(name)
        if entry is not None and value is not None and not _is_one_of(value, entry.harmless):
            raise invalid(f"`{name}` is refused: {entry.why}. Leave it out.", param=name, code="unsupported_parameter")
    return {name: value for name, value in body.items() if name not in refused}


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in harmless)


Body = TypeVar("Body", bound=BaseModel)

MAX_MISTAKES: Final = 1000
MAX_NAMES: Final = 100_000
"""Limit on the names in all objects of a body together. A conversation with the most messages allowed has 82,000, tool calls
included."""
MAX_CONTAINERS: Final = 100_000
"""Lists and objects in a body."""
MAX_VALUES: Final = 2**20
"""Entries of all lists and objects of a body: token ids of the longest context windows."""
MAX_EXACT: Final = 2**53
"""Up to it every integer is exactly representable as a float."""
UNKNOWN: Final = "extra_forbidden"
NEAR: Final = 0.7
"""Minimum similarity of a suggested name; 1 is equal."""
MANY_FIELDS: Final = f"(more than {MAX_MISTAKES:,} fields)"
"""Stands for unknown fields that are too many to name."""
_TOO_MANY: Final = "The body has too many mistakes to name one; check it against the documentation."
_INDEX: Final = re.compile(r"\[\d+\]")
_TAGS: Final = frozenset({"text", "image_url", "thinking"})
"""Types of entries that are names of fields too."""

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
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} or fewer",
    "literal_error": "one of {expected}",
    "union_tag_invalid": "of a `type` among {expected_tags}",
    "union_tag_not_found": "an object with a `type`",
}
_WHOLE: Final = frozenset({"int_type", "int_from_float"})
"""Errors that an integral float in place of a whole number may cause."""
_KINDS: Final = frozenset({"union_tag_invalid", "literal_error"})
"""Errors about a `type` that the API may define but this server does not support, such as an image."""


def parse_body(raw: bytes, kind: type[Body], refused: Mapping[str, Refused] = REFUSED) -> Body:
    """Reads the body of a request.

    Args:
        raw: UTF-8 JSON.
        kind: type of the request object.
        refused: fields of the API that this server does not support.

    Raises:
        InvalidRequestError: it is not JSON, not a valid object, or requests something unsupported.
    """
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return check_fields(refuse_unsupported(body, refused), kind)


def check_fields(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Converts the fields of a body to a request object; records unknown ones, unless they are refused.

    Raises:
        InvalidRequestError: they are not a valid object.
    """
    read = _read(body, kind)
    if isinstance(read, _Refusal) and read.may_be_float:
        whole = with_whole_numbers(body)
        if whole is not body:
            read = _read(whole, kind)
    if isinstance(read, _Refusal):
        raise read.error
    return read


def with_whole_numbers(value: Any) -> Any:
    """Returns a JSON value with integral floats as integers (equal in JSON Schema 2020-12 core, 6.3); itself if it has none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value
    if isinstance(value, list):
        changed = [with_whole_numbers(item) for item in value]
        return value if all(map(operator.is_, changed, value)) else changed
    if isinstance(value, dict):
        walked = {key: with_whole_numbers(item) for key, item in value.items()}
        return value if all(walked[key] is value[key] for key in value) else walked
    return value


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a body is not a valid object.

    Attributes:
        may_be_float: it may be valid with whole numbers in place of integral floats.
    """

    error: InvalidRequestError
    may_be_float: bool = False


def _read(body: Mapping[str, Any], kind: type[Body]) -> Body | _Refusal:
    """Returns an object, or why the body is not valid.

    It raises nothing: a chained exception keeps the previous one alive, and pydantic's holds an entry for every mistake.
    """
    problems: list[ErrorDetails] = []
    for extra in (None, "ignore"):
        try:
            read = kind.model_validate(body, extra=extra)
        except ValidationError as error:
            if error.error_count() > MAX_MISTAKES:  # computes all errors to get the first
                if extra is not None or ignored_fields().is_strict:
                    return _Refusal(invalid(_TOO_MANY))
                ignored_fields().add(MANY_FIELDS)
                continue  # they may all be unknown fields, such as one in each message
            problems = error.errors(include_url=False, include_input=False)
        except InvalidRequestError as error:  # of a validator of ours
            return _Refusal(error.with_traceback(None), may_be_float=True)
        except UnicodeError:
            return _Refusal(invalid("The body must be Unicode text without lone surrogates.", code="invalid_json"))
        else:
            _note(problems, kind)
            return read
        if ignored_fields().is_strict or not any(problem["type"] == UNKNOWN for problem in problems):
            break
    return _Refusal(_explain(problems[0], kind), may_be_float=any(problem["type"] in _WHOLE for problem in problems))


def _note(problems: Iterable[ErrorDetails], kind: type[BaseModel]) -> None:
    known = _known_fields(kind)
    for problem in problems:
        *parents, name = _without_tags(problem["loc"])
        parent = _path(tuple(parents), known) if parents else ""
        path = f"{parent}.{shown_name(str(name))}" if parent else shown_name(str(name))
        ignored_fields().add(_INDEX.sub("[]", path))


def parse_json(raw: bytes) -> object:
    """Reads JSON (RFC 8259): UTF-8, no NaN, no lone surrogates, at most 200 levels deep.

    Raises:
        InvalidRequestError: it is invalid, and the message says where; or it has more parts than are taken.
    """
    if not raw.strip():
        raise invalid("The body is empty; send a JSON object.", code="invalid_json")
    check_num_parts(raw)
    try:
        # The library would cache short strings for the next body: nothing of a request may outlive it.
        return from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def check_num_parts(raw: bytes) -> None:
    """Refuses JSON with very many parts before any object is made.

    An object takes up to a hundred times the memory of its text, and a mistake in it takes more. This check takes one or two
    nanoseconds per byte of text, mostly without the interpreter lock, and five bytes of memory.

    Args:
        raw: it need not be valid.

    Raises:
        InvalidRequestError: it has more than `MAX_NAMES`, `MAX_CONTAINERS` or `MAX_VALUES`.
    """
    if len(raw) <= min(MAX_NAMES, MAX_CONTAINERS, MAX_VALUES):
        return
    if not _too_many_parts(np.frombuffer(raw, np.uint8)):  # counts those inside of strings as well
        return
    # Without escapes every quotation mark begins or ends a string. A backslash escapes the byte behind it, from the left.
    text = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_outside = (np.add.accumulate(text == ord('"'), dtype=np.uint8) & 1) == 0
    if found := _too_many_parts(text[is_outside]):
        raise invalid(f"The body has {found}; send several requests.", code="too_many_parts")


def _too_many_parts(text: npt.NDArray[np.uint8]) -> str:
    """Returns the kind of part of which a text without strings has too many; empty if none."""
    num_containers = sum(np.count_nonzero(text == ord(sign)) for sign in "[{")
    if num_containers > MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS:,} lists and objects"
    if np.count_nonzero(text == ord(":")) > MAX_NAMES:
        return f"more than {MAX_NAMES:,} names of fields"
    if np.count_nonzero(text == ord(",")) + num_containers > MAX_VALUES:
        return f"lists and objects of more than {MAX_VALUES:,} entries together"
    return ""


def _explain(details: ErrorDetails, kind: type[BaseModel]) -> InvalidRequestError:
    known = _known_fields(kind)
    location, problem, context = _without_tags(details["loc"]), details["type"], details.get("ctx", {})
    if problem == UNKNOWN:
        return _unknown_field(location, kind, known)
    path = _path(location, known)
    if len(location) > 1 and location[-1] == "[key]":
        path = _path(location[:-2], known)
        return invalid(f"A name in `{path}` must be {_TYPES.get(problem, 'another one')}.", path, "invalid_value")
    if len(location) > 1 and location[-2] == "arguments" and problem == "string_type":
        path = _path(location[:-1], known)
        return invalid(f"A value in `{path}` must be a string.", path, "invalid_type")
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


def _unknown_field(location: tuple[int | str, ...], kind: type[BaseModel], known: Set[str]) -> InvalidRequestError:
    """Reports an unknown field, and suggests a similar field of its object."""
    name = shown_name(str(location[-1]))
    parent = f"`{_path(location[:-1], known)}`" if len(location) > 1 else "the body"
    near = difflib.get_close_matches(name, sorted(_fields_at(location[:-1], kind)), n=1, cutoff=NEAR)
    hint = f"; did you mean `{near[0]}`?" if near else "; leave it out."
    return invalid(f"`{name}` is an unknown field of {parent}{hint}", name, "unknown_parameter")


def _fields_at(location: tuple[int | str, ...], kind: type[BaseModel]) -> set[str]:
    """Returns the valid field names of the object at a location."""
    kinds = {kind}
    for part in location:
        inner = {
            model
            for outer in kinds
            for name, info in _fields_of(outer)
            if name == part
            for model in _models_in(info.annotation)
        }
        kinds = inner or _tagged(kinds, part)
    return {name for one in kinds for name, _ in _fields_of(one)}


def _tagged(kinds: set[type[BaseModel]], tag: int | str) -> set[type[BaseModel]]:
    """Returns those of several types that have the name, or the `type`, in a location; all if none has."""
    tagged = {
        kind
        for kind in kinds
        if kind.__name__ == tag or ((info := kind.model_fields.get("type")) is not None and tag in get_args(info.annotation))
    }
    return tagged or kinds


def _without_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns a location without the `type` of list entries where that equals the name of one of their fields."""
    last = len(location) - 1
    return tuple(
        part for i, part in enumerate(location) if not (part in _TAGS and 0 < i < last and isinstance(location[i - 1], int))
    )


def _path(location: tuple[int | str, ...], known: Set[str]) -> str:
    """Returns a location such as `messages[0].content`, without client-chosen keys."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in known:
            path += f".{part}" if path else part
    return path or "body"


@cache
def _known_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Returns the names of all fields in a type of request. Walking its types takes longer than reading a request."""
    return frozenset(_field_names(kind))


def _field_names(kind: type[BaseModel]) -> Iterator[str]:
    for name, info in _fields_of(kind):
        yield name
        for inner in _models_in(info.annotation):
            yield from _field_names(inner)


def _fields_of(kind: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yields the fields of one object under the names that clients use."""
    for name, info in kind.model_fields.items():
        yield info.alias or name, info


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
