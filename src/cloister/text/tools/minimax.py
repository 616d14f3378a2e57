"""MiniMax-M2: `<minimax:tool_call><invoke name="name"><parameter name="key">value</parameter></invoke></minimax:tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, json_value, literal
from cloister.text.tools.qwen3_coder import is_plain_text, spell_argument
from cloister.text.tools.reading import Reading

LIST, END_LIST = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, END_INVOKE = '<invoke name="', "</invoke>"
PARAMETER, END_PARAMETER = '<parameter name="', "</parameter>"
_TEXT: Final = f'text[suffix="{END_PARAMETER}"]: /(?s:.*)/'
"""Whatever comes before the end of the parameter, in Lark's notation."""


class InvokedCalls:
    """Tags in place of JSON: a value is text where the schema says so, else JSON; each comes when it is complete."""

    marks = (LIST,)
    inner_marks = (END_LIST,)
    is_bare = False
    example = f'{LIST}\n{INVOKE}name">\n{PARAMETER}key">value{END_PARAMETER}\n{END_INVOKE}\n{END_LIST}'

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        source = reader.source
        yield from source.skip_space()
        yield from source.expect(INVOKE)
        yield from self._read_call(reader)
        while (yield from source.take(INVOKE)):
            yield from self._read_call(reader)
        yield from source.take(END_LIST)

    def _read_call(self, reader: CallReader) -> Reading[None]:
        source = reader.source
        name = yield from source.take_until('">')
        yield reader.begin(name)
        yield reader.add("{")
        keys: set[str] = set()
        yield from source.skip_space()
        while (yield from source.take(PARAMETER)):
            key = yield from source.take_until('">')
            value = yield from source.take_until(END_PARAMETER)
            yield reader.add(spell_argument(reader.tools[name], keys, key, value))
            keys.add(key)
            yield from source.skip_space()
        yield from source.expect(END_INVOKE)
        yield reader.add("}")
        yield reader.end()
        yield from source.skip_space()

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        calls = "call" if is_one else 'call ("\\n" call)*'
        start = f'start: {spell(LIST)} "\\n" {calls} "\\n" {spell(END_LIST)}'
        return "\n".join([start, choice_rule(tools, _write), _TEXT])


def _write(tool: Tool) -> str:
    parameters = tool.parameters
    shared = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
    parts = [literal(f'{INVOKE}{tool.name}">')]
    for key, schema in parameters.get("properties", {}).items():
        value = "text" if is_plain_text(schema) else f"{json_value(shared | schema)} {literal(END_PARAMETER)}"
        part = f"{literal(chr(10) + PARAMETER + key + chr(34) + '>')} {value}"
        parts.append(part if key in parameters.get("required", []) else f"({part})?")
    return " ".join([*parts, literal("\n" + END_INVOKE)])


FAMILIES.register("minimax_m2", THREAT)(InvokedCalls())
