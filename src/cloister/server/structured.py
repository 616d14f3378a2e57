"""The form that a request wants its answer in: OpenAI's `response_format`, and the fields of vLLM and llama.cpp beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cloister.server.errors import invalid
from cloister.server.schemas import GenerationBody
from cloister.text import grammar as grammars
from cloister.types.grammar import Grammar, GrammarKind


def read_grammar(body: GenerationBody) -> Grammar | None:
    """Returns the grammar of an answer, checked, or None if it is free. May take a few hundred milliseconds.

    Raises:
        InvalidRequestError: it cannot be followed, or two fields ask for one; names the field.
    """
    wishes = list(_wishes(body))
    if not wishes:
        return None
    if len(wishes) > 1:
        fields = " and ".join(f"`{param}`" for param, _ in wishes)
        raise invalid(f"{fields} ask for different forms of one answer; send one of them.", wishes[1][0], "invalid_value")
    param, grammar = wishes[0]
    return grammars.check_grammar(grammar, param)


def _wishes(body: GenerationBody) -> Iterator[tuple[str, Grammar]]:
    """Yields every form that is asked for, with the field that asks."""
    yield from _response_format(body)
    guided = (body.guided_json, None, body.guided_regex, body.guided_choice, body.guided_grammar)
    yield from _extras("guided_", *guided)
    if (outputs := body.structured_outputs) is not None:
        extras = (outputs.json_, outputs.json_object, outputs.regex, outputs.choice, outputs.grammar)
        yield from _extras("structured_outputs.", *extras)
    if body.grammar is not None:
        yield "grammar", Grammar(GrammarKind.LARK, body.grammar)


def _response_format(body: GenerationBody) -> Iterator[tuple[str, Grammar]]:
    form = body.response_format
    if form is None:
        return
    if (form.json_schema is not None) != (form.type == "json_schema"):
        raise invalid(
            "`response_format.json_schema` is required for the type json_schema, and only there.",
            "response_format.json_schema",
            "invalid_value",
        )
    if form.type == "json_object" or (form.json_schema is not None and form.json_schema.schema_ is None):
        yield "response_format", Grammar(GrammarKind.JSON_OBJECT)
    elif form.json_schema is not None:
        yield "response_format.json_schema.schema", _of_schema(form.json_schema.schema_)


def _extras(
    prefix: str, schema: Any, is_object: bool | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, Grammar]]:
    if schema is not None:
        yield f"{prefix}json", _of_schema(schema)
    if is_object:
        yield f"{prefix}json_object", Grammar(GrammarKind.JSON_OBJECT)
    if regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        yield f"{prefix}choice", Grammar(GrammarKind.CHOICE, json.dumps(choice))
    if grammar is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.LARK, grammar)


def _of_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))
