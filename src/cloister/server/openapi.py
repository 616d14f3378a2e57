"""The OpenAPI 3.1 document, generated from the table of operations and their models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cloister import __version__
from cloister.server.operations import JSON, MEANINGS, OPERATIONS, Operation
from cloister.server.parse import Refused

REF: Final = "#/components/schemas/"
_RETRY: Final = {"Retry-After": {"description": "Seconds until a retry makes sense.", "schema": {"type": "integer"}}}

_BY_NAME: Final = {"x-below": ("exclusiveMaximum", 0), "x-most": ("exclusiveMaximum", 1)}

Schemas = dict[str, Any]


def describe_api(
    model: str,
    *,
    asks_for_keys: bool,
    strict_fields: bool = False,
    figures: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the document.

    Args:
        model: the served model name, for the examples.
        asks_for_keys: whether authenticated operations need an API key.
        strict_fields: bodies allow only the described fields.
        figures: the server's limits, by the names used in schemas (`x-below`, `x-most`): vocab_size, hidden_size,
            max_model_len, max_n.
    """
    bodies, own = _read_bodies({op.body for op in OPERATIONS if op.body is not None})
    refused = {op.body.__name__: op.refused for op in OPERATIONS if op.body is not None}
    answers, others = _read_answers([kind for op in OPERATIONS for kind in _answers_of(op)], taken=own)
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method.lower()] = _describe(op, bodies, answers, model, asks_for_keys)
    own = {name: _with_refused(schema, refused.get(name, {})) for name, schema in own.items()}
    if not strict_fields:
        own = _opened(own)
    components: dict[str, Any] = {"schemas": _bound({**own, **others}, figures or {})}
    if asks_for_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cloister", "version": __version__, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "paths": paths,
        "components": components,
    }


def _answers_of(op: Operation) -> Iterator[Any]:
    yield from (kind for kind in (op.answer, op.event, op.failure, op.unavailable) if kind is not None)


def _read_bodies(kinds: Iterable[type[BaseModel]]) -> tuple[Mapping[Any, Any], Schemas]:
    """Returns the schema of each body as a reference, and all referenced schemas."""
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    found, definitions = models_json_schema([(kind, "validation") for kind in ordered], ref_template=REF + "{model}")
    return {kind: schema for (kind, _), schema in found.items()}, definitions["$defs"]


def _read_answers(kinds: list[Any], taken: Mapping[str, Any]) -> tuple[Mapping[Any, Any], Schemas]:
    """Like `_read_bodies`; names already used by a body are renamed."""
    found, schemas = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
    clashes = {name for name in schemas if name in taken}
    renamed = {f"{name}Answer" if name in clashes else name: schema for name, schema in schemas.items()}
    return (
        {kind: _rename(schema, clashes) for kind, schema in zip(kinds, found, strict=True)},
        {name: _rename(schema, clashes) for name, schema in renamed.items()},
    )


def _rename(schema: Any, clashes: set[str]) -> Any:
    if isinstance(schema, list):
        return [_rename(item, clashes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    walked = {key: _rename(value, clashes) for key, value in schema.items()}
    name = str(walked.get("$ref", "")).removeprefix(REF)
    return {**walked, "$ref": f"{REF}{name}Answer"} if name in clashes else walked


def _bound(schema: Any, figures: Mapping[str, int]) -> Any:
    """Replaces named limits in schemas by the model's values."""
    if isinstance(schema, list):
        return [_bound(item, figures) for item in schema]
    if not isinstance(schema, dict):
        return schema
    walked = {key: _bound(value, figures) for key, value in schema.items() if key not in _BY_NAME}
    for key, (keyword, more) in _BY_NAME.items():
        if schema.get(key) in figures:
            walked[keyword] = figures[schema[key]] + more
    return walked


def _with_refused(schema: dict[str, Any], refused: Mapping[str, Refused]) -> dict[str, Any]:
    """Adds the fields that this server does not support, with the accepted values."""
    fields = {
        name: {"enum": [None, *entry.harmless], "description": f"Refused: {entry.why}."} for name, entry in refused.items()
    }
    return {**schema, "properties": {**schema["properties"], **fields}} if fields else schema


def _opened(schema: Any) -> Any:
    """Allows undescribed fields in objects: they are ignored, and listed in the reply."""
    if isinstance(schema, list):
        return [_opened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _opened(value) for key, value in schema.items() if (key, value) != ("additionalProperties", False)}


def _describe(
    op: Operation, bodies: Mapping[Any, Any], answers: Mapping[Any, Any], model: str, asks_for_keys: bool
) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": op.name, "tags": [op.group], "summary": op.summary}
    parameters = [part.strip("{}") for part in op.path.split("/") if part.startswith("{")]
    if parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
            for name in parameters
        ]
    if op.body is not None:
        described["requestBody"] = {"required": True, "content": {op.body_type: {"schema": bodies[op.body]}}}
    described["responses"] = {
        "200": {"description": MEANINGS[200], "content": _contents(op, answers)},
        **{str(status): _failure(op, status, answers) for status in op.statuses},
    }
    if asks_for_keys and not op.is_open:
        described["security"] = [{"bearer": []}, {"header": []}]
    return described


def _contents(op: Operation, answers: Mapping[Any, Any]) -> dict[str, Any]:
    if op.answer is None:
        return {op.media_type: {"schema": {"type": "string"}}}
    contents: dict[str, Any] = {op.media_type: {"schema": answers[op.answer]}}
    if op.event is not None:
        # OpenAPI 3.1 cannot describe the events of a stream.
        contents[op.stream_type] = {
            "schema": {"description": "With `stream`: events, each with JSON.", "x-event": answers[op.event]}
        }
    return contents


def _failure(op: Operation, status: int, answers: Mapping[Any, Any]) -> dict[str, Any]:
    kind = op.unavailable if status == 503 else op.failure
    reply = {"description": MEANINGS[status], "content": {JSON: {"schema": answers[kind]}}}
    return {**reply, "headers": _RETRY} if status in (429, 503) else reply
