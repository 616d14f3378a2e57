"""Mistral: `[TOOL_CALLS]name[ARGS]{...}` for each call since tokenizer version 11, before that a mark and a JSON list of
calls (as Phi-4-mini and others write them)."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, call_rules, choice_rule, literal, schema
from cloister.text.tools.reading import Reading

# Mistral since tokenizer version 11: `[TOOL_CALLS]name[ARGS]{...}` for each call.


MARK, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralCalls:
    """A name, an id in versions before 13, and an object of arguments, without JSON around them."""

    marks = (MARK,)
    inner_marks = (CALL_ID, ARGUMENTS)
    is_bare = False
    example = f"{MARK}name{ARGUMENTS}{{...}}"

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        name = yield from reader.source.take_until(ARGUMENTS)
        yield reader.begin(name.partition(CALL_ID)[0].strip())
        yield from reader.source.skip_space()
        yield from reader.read_arguments()

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        rules = choice_rule(tools, lambda tool: f"{spell(MARK)} {literal(tool.name)} {spell(ARGUMENTS)} {schema(tool)}")
        return "\n".join([f"start: {'call' if is_one else 'call+'}", rules])


FAMILIES.register("mistral_args", THREAT)(MistralCalls())


# A mark and a JSON list of calls: `[{"name": ..., "arguments": {...}}, ...]`, as Mistral, Phi-4-mini and Granite write.


class ListedCalls:
    """All calls in one list.

    Args:
        marks: what may begin the list; the first one is what a forced call is written with.
        close: what ends it; nothing where the end of the list is enough.
    """

    is_bare = False

    def __init__(self, *marks: str, close: str = "") -> None:
        self.marks = marks
        self.inner_marks = (close,) if close else ()
        self.example = f'{marks[0]}[{{"name": "...", "arguments": {{...}}}}]{close}'
        self._close = close

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        yield from reader.source.skip_space()
        if (yield from reader.source.peek()) == "{":  # a single call may stand without the list
            yield from reader.read_object()
        else:
            yield from reader.read_list()
        if self._close:
            yield from reader.source.skip_space()
            yield from reader.source.take(self._close)

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        calls = "call" if is_one else 'call (", " call)*'
        close = spell(self._close) if self._close else ""
        return "\n".join([f'start: {spell(self.marks[0])} "[" {calls} "]" {close}', call_rules(tools)])


FAMILIES.register("mistral", THREAT)(ListedCalls("[TOOL_CALLS]"))
FAMILIES.register("phi4", THREAT)(ListedCalls("<|tool_call|>", "functools", close="<|/tool_call|>"))
FAMILIES.register("granite", THREAT)(ListedCalls("<|tool_call|>", "<tool_call>"))
