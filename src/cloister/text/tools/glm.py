"""GLM-4.5 and 4.6: the name of the function, then keys and values between marks, values unquoted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, json_value, literal
from cloister.text.tools.qwen3_coder import is_plain_text, spell_argument
from cloister.text.tools.reading import Reading

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"
_TEXT: Final = f'text[suffix="{END_VALUE}"]: /(?s:.*)/'
"""Whatever comes before the end of the value, in Lark's notation."""


class KeyedCalls:
    """`<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>`.

    A value is text where the schema says so, else JSON; each comes when it is complete.
    """

    marks = (CALL,)
    inner_marks = (END_CALL, KEY, END_KEY, VALUE, END_VALUE)
    is_bare = False
    example = f"{CALL}name\n{KEY}key{END_KEY}\n{VALUE}value{END_VALUE}\n{END_CALL}"

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        source = reader.source
        name = (yield from source.take_until("<")).strip()
        yield reader.begin(name)
        yield reader.add("{")
        keys: set[str] = set()
        while (yield from source.take(KEY[1:])):
            key = (yield from source.take_until(END_KEY)).strip()
            yield from source.skip_space()
            yield from source.expect(VALUE)
            value = yield from source.take_until(END_VALUE)
            yield reader.add(spell_argument(reader.tools[name], keys, key, value))
            keys.add(key)
            yield from source.skip_space()
            yield from source.expect("<")
        yield from source.expect(END_CALL[1:])
        yield reader.add("}")
        yield reader.end()

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        start = "block" if is_one else 'block ("\\n" block)*'
        block = f'block: {spell(CALL)} call "\\n" {spell(END_CALL)}'
        return "\n".join([f"start: {start}", block, choice_rule(tools, lambda tool: _write(tool, spell)), _TEXT])


def _write(tool: Tool, spell: Spell) -> str:
    parameters = tool.parameters
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    parts = [literal(tool.name)]
    for key, schema in parameters.get("properties", {}).items():
        head = f"{literal(chr(10))} {spell(KEY)} {literal(key)} {spell(END_KEY)} {literal(chr(10))} {spell(VALUE)}"
        part = f"{head} {_write_value(schema, shared, spell)}"
        parts.append(part if key in parameters.get("required", []) else f"({part})?")
    return " ".join(parts)


def _write_value(schema: Any, shared: dict[str, Any], spell: Spell) -> str:
    if is_plain_text(schema):
        # a mark that is a control token cannot be in a text, so that the text ends where it comes
        return "text" if spell(END_VALUE) == literal(END_VALUE) else f"/(?s:.*)/ {spell(END_VALUE)}"
    return f"{json_value(shared | schema)} {spell(END_VALUE)}"


FAMILIES.register("glm45", THREAT)(KeyedCalls())
