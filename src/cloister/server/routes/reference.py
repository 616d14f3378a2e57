"""`/openapi.json` and `/docs`: the API reference, as OpenAPI and as one HTML page without scripts or external requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, Final

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from cloister import __version__
from cloister.server.operations import JSON, MEANINGS, OPERATIONS, Operation
from cloister.server.parse import Refused, ignored_fields
from cloister.server.prompts import PromptReader
from cloister.server.route_table import RouteTable
from cloister.server.state import state_of

REF: Final = "#/components/schemas/"
_RETRY: Final = {"Retry-After": {"description": "Seconds until a retry makes sense.", "schema": {"type": "integer"}}}

_BY_NAME: Final = {"x-below": ("exclusiveMaximum", 0), "x-most": ("exclusiveMaximum", 1)}

Schemas = dict[str, Any]
STYLE: Final = files("cloister.server").joinpath("reference.css").read_text(encoding="utf-8")
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

Json = Mapping[str, Any]


def describe_api(
    model: str,
    *,
    asks_for_keys: bool,
    strict_fields: bool = False,
    figures: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document, made of the table of operations and their models.

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


# The page at /docs, written from the document.


def write_reference(document: Json) -> str:
    """Returns the page."""
    info, schemas = document["info"], document["components"]["schemas"]
    operations = [(path, method, op) for path, methods in document["paths"].items() for method, op in methods.items()]
    groups = [(group, list(members)) for group, members in groupby(operations, lambda item: item[2]["tags"][0])]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">',
        f"<title>{escape(info['title'])} API</title><style>{STYLE}</style></head><body>",
        '<a class="skip" href="#main">Skip to the reference</a>',
        f"<header><h1>{escape(info['title'])} API</h1><p>Version {escape(info['version'])}. The same as a file: ",
        '<a href="openapi.json">openapi.json</a>.</p></header>',
        '<nav aria-label="Operations">',
        *(_menu(group, members) for group, members in groups),
        '<h2>Models</h2><ul><li><a href="#models">All models</a></li></ul></nav><main id="main">',
        *(_section(group, members, schemas) for group, members in groups),
        '<section id="models"><h2>Models</h2>',
        *(_model(name, schema) for name, schema in sorted(schemas.items())),
        "</section></main></body></html>\n",
    ]
    return "".join(parts)


def _menu(group: str, members: list[tuple[str, str, Json]]) -> str:
    items = "".join(
        f'<li><a href="#{op["operationId"]}"><b class="{method}">{method.upper()}</b> {escape(path)}</a></li>'
        for path, method, op in members
    )
    return f"<h2>{escape(group)}</h2><ul>{items}</ul>"


def _section(group: str, members: list[tuple[str, str, Json]], schemas: Json) -> str:
    articles = "".join(_operation(*member, schemas) for member in members)
    return f"<section><h2>{escape(group)}</h2>{articles}</section>"


def _operation(path: str, method: str, op: Json, schemas: Json) -> str:
    head = f'<h3><b class="{method}">{method.upper()}</b> <code>{escape(path)}</code></h3><p>{escape(op["summary"])}.</p>'
    key = "<p>Asks for an API key: <code>Authorization: Bearer KEY</code>.</p>" if op.get("security") else ""
    body = "".join(
        f"<p>Body, {escape(media_type)}: {write_type(content['schema'])}</p>{_fields(_resolve(content['schema'], schemas))}"
        for media_type, content in op.get("requestBody", {}).get("content", {}).items()
    )
    answer = "".join(
        f"<p>Answer, {escape(media_type)}: {write_type(content['schema'])}</p>"
        for media_type, content in op["responses"]["200"]["content"].items()
    )
    rows = "".join(_reply(status, reply) for status, reply in op["responses"].items() if status != "200")
    errors = _table(("Status", "Meaning", "Body"), rows)
    return (
        f'<article id="{op["operationId"]}">{head}{key}{body}{answer}'
        f"<details><summary>Errors</summary>{errors}</details></article>"
    )


def _resolve(schema: Json, schemas: Json) -> Json:
    found: Json = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    return found


def _reply(status: str, reply: Json) -> str:
    bodies = "<br>".join(write_type(content["schema"]) for content in reply["content"].values())
    return f"<tr><td>{status}</td><td>{_prose(reply['description'])}</td><td>{bodies}</td></tr>"


def _table(columns: tuple[str, ...], rows: str) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>' if rows else ""


def _prose(text: str) -> str:
    """Returns text with backtick quotes as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def _model(name: str, schema: Json) -> str:
    about = f"<p>{_prose(schema['description'])}</p>" if "description" in schema else ""
    return f'<article id="model-{escape(name)}"><h3><code>{escape(name)}</code></h3>{about}{_fields(schema)}</article>'


def _fields(schema: Json) -> str:
    required = set(schema.get("required", ()))
    rows = "".join(_field(field, kind, field in required) for field, kind in schema.get("properties", {}).items())
    return _table(("Field", "Type", ""), rows)


def _field(name: str, schema: Json, is_required: bool) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{write_type(schema)}</td><td>{'required' * is_required}</td></tr>"


def write_type(schema: Json) -> str:
    """Describes a JSON schema in short HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#model-{name}">{name}</a>'
    if "x-event" in schema:
        return f"with <code>stream</code>, events, each with {write_type(schema['x-event'])}"
    if "anyOf" in schema or "oneOf" in schema:
        return " or ".join(dict.fromkeys(write_type(choice) for choice in schema.get("anyOf", schema.get("oneOf", ()))))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    kind = schema.get("type", "anything")
    if kind == "array":
        kind = f"list of {write_type(schema.get('items', {}))}"
    elif kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {write_type(schema['additionalProperties'])}"
    bounds = ", ".join(_bounds(schema))
    about = f" <small>{_prose(schema['description'])}</small>" if "description" in schema else ""
    return f"{kind} <small>({bounds})</small>{about}" if bounds else f"{kind}{about}"


_BOUNDS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {}",
    "pattern": "matching {}",
}


def _bounds(schema: Json) -> Iterator[str]:
    for name, words in _BOUNDS.items():
        if name in schema:
            yield escape(words.format(schema[name]))


router = RouteTable()

HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class ReferenceSettings:
    """The properties of a server that its reference page shows."""

    model: str
    asks_for_keys: bool
    strict_fields: bool
    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_n: int

    @classmethod
    def of(cls, reader: PromptReader) -> ReferenceSettings:
        return cls(
            reader.model_name,
            reader.gate.asks_for_keys,
            ignored_fields().is_strict,
            reader.vocab_size,
            reader.model.hidden_size,
            reader.model.max_model_len,
            reader.max_n,
        )

    def describe(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        figures = {name: getattr(self, name) for name in ("vocab_size", "hidden_size", "max_model_len", "max_n")}
        return describe_api(self.model, asks_for_keys=self.asks_for_keys, strict_fields=self.strict_fields, figures=figures)


@cache
def _as_json(settings: ReferenceSettings) -> bytes:
    return msgspec.json.encode(settings.describe())


@cache
def _as_page(settings: ReferenceSettings) -> bytes:
    return write_reference(settings.describe()).encode()


@router.get("/openapi.json")
async def report_api(request: Request) -> Response:
    """Returns the OpenAPI document."""
    state = state_of(request)
    body = await state.off_the_loop(_as_json, ReferenceSettings.of(state.reader))
    return Response(body, media_type="application/json")


@router.get("/docs")
async def show_reference(request: Request) -> Response:
    """Returns the document as a page."""
    state = state_of(request)
    body = await state.off_the_loop(_as_page, ReferenceSettings.of(state.reader))
    return Response(body, headers=HEADERS, media_type="text/html; charset=utf-8")
