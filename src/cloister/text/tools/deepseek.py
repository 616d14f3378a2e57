"""DeepSeek V3, R1 and V3.1: marked calls inside a marked list; older ones fence the arguments in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from cloister.text.tools.base import FAMILIES, THREAT, CallReader, Spell, Tool, choice_rule, literal, schema
from cloister.text.tools.reading import Reading

LIST, END_LIST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIND, FENCE = "function", "```"


class DeepSeekCalls:
    """`function<sep>name` and a fenced object, as V3 and R1 write; or `name<sep>` and an object, as V3.1 does.

    Args:
        is_fenced: how a forced call is written.
    """

    marks = (LIST,)
    inner_marks = (END_LIST, CALL, SEPARATOR, END_CALL)
    is_bare = False

    def __init__(self, *, is_fenced: bool) -> None:
        self._is_fenced = is_fenced
        call = f"{KIND}{SEPARATOR}name\n{FENCE}json\n{{...}}\n{FENCE}" if is_fenced else f"name{SEPARATOR}{{...}}"
        self.example = f"{LIST}{CALL}{call}{END_CALL}{END_LIST}"

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
        name = (yield from source.take_until(SEPARATOR)).strip()
        if name == KIND and KIND not in reader.tools:
            name = (yield from source.take_until("\n")).strip()
            yield from source.expect(FENCE + "json\n")
        yield reader.begin(name)
        yield from reader.read_arguments()
        yield from source.skip_space()
        yield from source.take(FENCE)
        yield from source.skip_space()
        yield from source.take(END_CALL)
        yield from source.skip_space()

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        calls = "call" if is_one else 'call ("\\n"? call)*'
        return "\n".join(
            [f"start: {spell(LIST)} {calls} {spell(END_LIST)}", choice_rule(tools, lambda t: self._write(t, spell))]
        )

    def _write(self, tool: Tool, spell: Spell) -> str:
        name = f"{literal(KIND)} {spell(SEPARATOR)} {literal(tool.name)}" if self._is_fenced else literal(tool.name)
        before = literal("\n```json\n") if self._is_fenced else spell(SEPARATOR)
        after = literal("\n```") if self._is_fenced else ""
        return f"{spell(CALL)} {name} {before} {schema(tool)} {after} {spell(END_CALL)}"


FAMILIES.register("deepseek", THREAT)(DeepSeekCalls(is_fenced=True))
FAMILIES.register("deepseek_v31", THREAT)(DeepSeekCalls(is_fenced=False))
