"""Constraints between request fields, as JSON Schema (2020-12), for the API reference.

Each value goes into a model's `json_schema_extra`. They tell programs that generate requests from /openapi.json what is
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import ConfigDict

Schema = dict[str, Any]

_ABSENT: Final[Schema] = {"type": "null"}
_TEXT: Final[Schema] = {"type": ["string", "array"]}
_NO_CALLS: Final[Schema] = {"type": ["array", "null"], "maxItems": 0}


def where(field: str, *values: str, needs: dict[str, Schema] | None = None, takes: dict[str, Schema] | None = None) -> Schema:
    """Returns the schema of an object whose `field` has one of `values`.

    Args:
        needs: fields that are then required.
        takes: the then valid values of fields, if present.
    """
    needs = needs or {}
    return {"properties": {field: {"enum": [*values]}, **needs, **(takes or {})}, "required": [field, *needs]}


def one_of(*schemas: Schema) -> ConfigDict:
    """Returns the model setting for "matches at least one of several schemas"."""
    return ConfigDict(json_schema_extra={"anyOf": [*schemas]})


def all_of(*choices: Sequence[Schema]) -> ConfigDict:
    """Returns the model setting for "matches at least one schema of each choice"."""
    return ConfigDict(json_schema_extra={"allOf": [{"anyOf": [*choice]} for choice in choices]})


def _is_true(field: str) -> Schema:
    return {"properties": {field: {"const": True}}, "required": [field]}


def _blocks(*types: str) -> Schema:
    return {"content": {"type": ["string", "array"], "items": {"properties": {"type": {"enum": [*types]}}}}}


CHAT_MESSAGE: Final = one_of(
    where(
        "role",
        "system",
        "developer",
        "user",
        needs={"content": _TEXT},
        takes={"tool_calls": _NO_CALLS, "tool_call_id": _ABSENT},
    ),
    where("role", "assistant", needs={"content": _TEXT}, takes={"tool_call_id": _ABSENT}),
    where("role", "assistant", needs={"tool_calls": {"type": "array", "minItems": 1}}, takes={"tool_call_id": _ABSENT}),
    where("role", "tool", needs={"content": _TEXT, "tool_call_id": {"type": "string"}}, takes={"tool_calls": _NO_CALLS}),
)
RESPONSE_FORMAT: Final = one_of(
    where("type", "json_schema", needs={"json_schema": {"type": "object"}}),
    where("type", "text", "json_object", takes={"json_schema": _ABSENT}),
)
MESSAGE_PARAM: Final = one_of(
    where("role", "user", takes=_blocks("text", "image", "tool_result")),
    where("role", "assistant", takes=_blocks("text", "thinking", "tool_use")),
    where("role", "system", takes=_blocks("text")),
)
TOOL_CHOICE_PARAM: Final = one_of(
    where("type", "tool", needs={"name": {"type": "string"}}),
    where("type", "auto", "any", "none", takes={"name": _ABSENT}),
)
_TOOLS: Final = (
    {"properties": {"tool_choice": {"enum": [None, "none", "auto", {"type": "none"}, {"type": "auto"}]}}},
    {"properties": {"tools": {"type": "array", "minItems": 1}}, "required": ["tools"]},
)
_TOP_LOGPROBS: Final = ({"properties": {"top_logprobs": _ABSENT}}, _is_true("logprobs"))
_A_TOKEN: Final[Schema] = {"properties": {"max_tokens": {"minimum": 1}}}
TOOLS: Final = one_of(*_TOOLS)
CHAT: Final = all_of(_TOOLS, _TOP_LOGPROBS, (_A_TOKEN,))
COMPLETION: Final = one_of(_A_TOKEN, _is_true("echo"))
OLLAMA_GENERATION: Final = one_of(*_TOP_LOGPROBS)
