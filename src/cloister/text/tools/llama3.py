"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}` as the whole answer, with or without `<|python_tag|>` before it."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, call_rules
from cloister.text.tools.reading import Reading

MARK = "<|python_tag|>"


class LlamaCalls:
    """Objects with `;` between them."""

    marks = (MARK,)
    inner_marks: tuple[str, ...] = ()
    is_bare = True
    example = '{"name": "...", "parameters": {...}}'

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        source = reader.source
        while True:
            yield from source.skip_space()
            yield from reader.read_object()
            yield from source.skip_space()
            if not (yield from source.take(";")):
                return

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        start = "call" if is_one else 'call ("; " call)*'
        return "\n".join([f"start: {start}", call_rules(tools, "parameters")])


FAMILIES.register("llama3", THREAT)(LlamaCalls())
