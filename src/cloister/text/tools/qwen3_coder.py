"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, values unquoted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, json_value, literal
from cloister.text.tools.reading import MalformedError, Reading

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_TEXT: Final = f'text[suffix="{END_PARAMETER}"]: /(?s:.*)/'
"""Whatever comes before the end of the parameter, in Lark's notation."""


class TaggedCalls:
    """Tags in place of JSON: a value is text where the schema says so, else JSON; each comes when it is complete."""

    marks = (CALL,)
    inner_marks = (END_CALL,)
    is_bare = False
    example = f"{CALL}\n{FUNCTION}name>\n{PARAMETER}key>\nvalue\n{END_PARAMETER}\n{END_FUNCTION}\n{END_CALL}"

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        source = reader.source
        yield from source.skip_space()
        yield from source.expect(FUNCTION)
        name = (yield from source.take_until(">")).strip()
        yield reader.begin(name)
        yield reader.add("{")
        keys: set[str] = set()
        yield from source.skip_space()
        while (yield from source.take(PARAMETER)):
            key = (yield from source.take_until(">")).strip()
            value = yield from source.take_until(END_PARAMETER)
            yield reader.add(spell_argument(reader.tools[name], keys, key, value))
            keys.add(key)
            yield from source.skip_space()
        yield from source.expect(END_FUNCTION)
        yield reader.add("}")
        yield reader.end()
        yield from source.skip_space()
        yield from source.take(END_CALL)

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        start = "block" if is_one else 'block ("\\n" block)*'
        block = f'block: {spell(CALL)} "\\n" call "\\n" {spell(END_CALL)}'
        return "\n".join([f"start: {start}", block, choice_rule(tools, _write), _TEXT])


def spell_argument(tool: Tool, keys: AbstractSet[str], key: str, value: str) -> str:
    """Returns the next argument of a call as JSON, after those of `keys`.

    Raises:
        MalformedError: there is one of that name.
    """
    if key in keys:
        raise MalformedError
    return f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: {to_json(value, tool.parameters, key)}"


def to_json(value: str, parameters: Mapping[str, Any], key: str) -> str:
    """Returns a value as JSON. One line break on each side of it is the tags' own."""
    value = value.removeprefix("\n").removesuffix("\n")
    if not _is_text(parameters.get("properties", {}).get(key)):
        try:
            return json.dumps(json.loads(value, parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass  # a schema that this cannot see may want a string
    return json.dumps(value, ensure_ascii=False)


def _refuse(_: str) -> None:
    raise ValueError


def _is_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def is_plain_text(schema: object) -> bool:
    """Whether any text follows a schema."""
    return (
        isinstance(schema, Mapping)
        and schema.get("type") == "string"
        and schema.keys() <= {"type", "description", "title", "default"}
    )


def _write(tool: Tool) -> str:
    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", [])
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    parts = [literal(f"{FUNCTION}{tool.name}>")]
    for key, schema in properties.items():
        value = "text" if is_plain_text(schema) else " ".join([json_value(shared | schema), literal(f"\n{END_PARAMETER}")])
        part = " ".join([literal(f"\n{PARAMETER}{key}>\n"), value])
        parts.append(part if key in required else f"({part})?")
    return " ".join([*parts, literal("\n" + END_FUNCTION)])


FAMILIES.register("qwen3_coder", THREAT)(TaggedCalls())
