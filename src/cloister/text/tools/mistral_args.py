"""Mistral since tokenizer version 11: `[TOOL_CALLS]name[ARGS]{...}` for each call."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, literal, schema
from cloister.text.tools.reading import Reading

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
