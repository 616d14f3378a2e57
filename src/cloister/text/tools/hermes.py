"""Hermes, Qwen 2.5 and 3, and our own models: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, call_rules
from cloister.text.tools.reading import Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls:
    """One object between marks for each call."""

    marks = (OPEN,)
    inner_marks = (CLOSE,)
    is_bare = False
    example = f'{OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        yield from reader.source.skip_space()
        yield from reader.read_object()
        yield from reader.source.skip_space()
        yield from reader.source.take(CLOSE)  # a model that ends its turn without it has called all the same

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        start = "block" if is_one else 'block ("\\n"? block)*'
        block = f'block: {spell(OPEN)} "\\n"? call "\\n"? {spell(CLOSE)}'
        return "\n".join([f"start: {start}", block, call_rules(tools)])


FAMILIES.register("hermes", THREAT)(HermesCalls())
