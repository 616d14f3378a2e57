"""Kimi K2: a marked list of marked calls, each with its number behind the name of the function: `functions.name:0`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, literal, schema
from cloister.text.tools.reading import Reading

LIST, END_LIST = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAMESPACE: Final = "functions."


class KimiCalls:
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, inside of a list."""

    marks = (LIST,)
    inner_marks = (END_LIST, CALL, ARGUMENTS, END_CALL)
    is_bare = False
    example = f"{LIST}{CALL}{_NAMESPACE}name:0{ARGUMENTS}{{...}}{END_CALL}{END_LIST}"

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        source = reader.source
        yield from source.skip_space()
        yield from source.expect(CALL)
        yield from self._read_call(reader)
        while (yield from source.take(CALL)):
            yield from self._read_call(reader)
        yield from source.take(END_LIST)

    def _read_call(self, reader: CallReader) -> Reading[None]:
        source = reader.source
        name = (yield from source.take_until(ARGUMENTS)).strip()
        yield reader.begin(_name_of(name, reader))
        yield from source.skip_space()
        yield from reader.read_arguments()
        yield from source.skip_space()
        yield from source.take(END_CALL)
        yield from source.skip_space()

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        def write(tool: Tool) -> str:
            name = literal(f"{_NAMESPACE}{tool.name}:")
            return f"{spell(CALL)} {name} /[0-9]{{1,3}}/ {spell(ARGUMENTS)} {schema(tool)} {spell(END_CALL)}"

        start = f"start: {spell(LIST)} {'call' if is_one else 'call+'} {spell(END_LIST)}"
        return "\n".join([start, choice_rule(tools, write)])


def _name_of(written: str, reader: CallReader) -> str:
    """Returns the name without namespace and number, unless a tool is called as it is written."""
    if written in reader.tools:
        return written
    name, _, number = written.rpartition(":")
    name = name if number.isdecimal() else written
    return name if name in reader.tools else name.removeprefix(_NAMESPACE)


FAMILIES.register("kimi_k2", THREAT)(KimiCalls())
