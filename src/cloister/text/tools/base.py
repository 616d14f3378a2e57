"""The protocol of tool-call formats, what all of them share, how calls are found in a streamed answer, and which format a chat
template uses. Anything that is not a valid call of an offered tool is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, Part, Text
from cloister.text.tools.reading import MalformedError, OutputBuffer, Reading
from cloister.types.registry import Registry
from cloister.types.threat import ThreatProfile

WHITESPACE: Final = r"[ ]|\n[ ]{0,32}"
"""What may stand once between the parts of arguments that are forced: without a bound a model can write spaces for ever."""
THREAT: Final = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="none of its own: it reads the text of one answer and is gone with it",
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: letters, digits, `_`, `-` and `.`.
        parameters: JSON schema of its arguments, an object.
        description: for the model.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str | None = None

    def to_template(self) -> dict[str, Any]:
        """Returns it as chat templates take tools: as in the OpenAI API."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


Spell = Callable[[str], str]
"""Returns a mark as Lark's notation writes it: a string, or the token that it is."""


class ToolCallFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What begins calls, wherever it stands in an answer."""
        ...

    @property
    def inner_marks(self) -> tuple[str, ...]:
        """What else is written around calls. A mark that is a control token has no text unless it is asked for."""
        ...

    @property
    def is_bare(self) -> bool:
        """Whether calls may also stand without a mark, as the whole answer."""
        ...

    @property
    def example(self) -> str:
        """How a call looks, for a model whose template does not tell it."""
        ...

    def read(self, reader: CallReader, mark: str) -> Reading[None]:
        """Reads the calls after a mark (nothing for calls without one).

        Raises:
            MalformedError: what stands there is no call.
        """
        ...

    def grammar(self, tools: Sequence[Tool], spell: Spell, *, is_one: bool) -> str:
        """Returns a grammar in Lark's notation, with `%json` for schemas, of an answer that only calls.

        Args:
            is_one: exactly one call; else one or more, where the family can write more.
        """
        ...


FAMILIES: Final[Registry[ToolCallFormat]] = Registry("tool parser")


class CallReader:
    """The steps of reading calls.

    Args:
        tools: by name; what calls something else is no call.
    """

    def __init__(self, source: OutputBuffer, tools: Mapping[str, Tool]) -> None:
        self.source = source
        self.tools = tools
        self.num_calls = 0
        self.is_open = False

    def begin(self, name: str) -> Part:
        """Returns the beginning of a call.

        Raises:
            MalformedError: there is no tool of this name.
        """
        if name not in self.tools:
            raise MalformedError
        self.is_open = True
        return CallBegun(self.num_calls, name)

    def add(self, piece: str) -> Part:
        """Returns more of the arguments of the call that is open."""
        return Arguments(self.num_calls, piece)

    def end(self) -> Part:
        """Returns the end of the call that is open."""
        part = CallEnded(self.num_calls)
        self.num_calls += 1
        self.is_open = False
        self.source.keep()
        return part

    def give_up(self) -> Part | None:
        """Returns what the letters that were read are in place of a call."""
        raw = self.source.raw()
        if not self.is_open:
            return Text(raw) if raw else None
        self.is_open = False
        self.num_calls += 1
        return CallBroken(self.num_calls - 1, raw)

    def read_arguments(self) -> Reading[None]:
        """Reads the object of arguments of the call that is open, and ends it."""
        yield from self.source.json_object(self.add)
        yield self.end()

    def read_object(self) -> Reading[None]:
        """Reads a call as an object with `name` and `arguments` or `parameters`, in any order."""
        source, name, arguments = self.source, "", ""
        yield from source.expect("{")
        while True:
            yield from source.skip_space()
            key = yield from source.json_string()
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            if key == "name" and not name:
                name = yield from source.json_string()
                yield self.begin(name)
                if arguments:
                    yield self.add(arguments)
            elif key in ("arguments", "parameters") and not arguments:
                arguments = yield from source.json_object(self.add if name else _hold)
            elif key in ("type", "id"):
                yield from source.json_string()
            else:
                raise MalformedError
            yield from source.skip_space()
            if not (yield from source.take(",")):
                break
        yield from source.expect("}")
        if not name:
            raise MalformedError
        if not arguments:
            yield self.add("{}")
        yield self.end()

    def read_list(self) -> Reading[None]:
        """Reads a JSON list of such objects."""
        source = self.source
        yield from source.expect("[")
        while True:
            yield from source.skip_space()
            yield from self.read_object()
            yield from source.skip_space()
            if not (yield from source.take(",")):
                break
        yield from source.expect("]")


def _hold(_: str) -> None:
    return None


def call_rules(tools: Sequence[Tool], key: str = "arguments") -> str:
    """Returns the Lark rule `call`: one of the tools as an object with `name`, then its arguments under `key`."""
    heads = {tool.name: f'{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in tools}
    return choice_rule(tools, lambda tool: f"{literal(heads[tool.name])} {schema(tool)} {literal('}')}")


def choice_rule(tools: Sequence[Tool], write: Callable[[Tool], str]) -> str:
    """Returns the Lark rule `call`: one of the tools, each as `write` has it."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    return "\n".join([*rules, *(f"call_{i}: {write(tool)}" for i, tool in enumerate(tools))])


def schema(tool: Tool) -> str:
    """Returns a tool's arguments in Lark's notation."""
    return json_value(tool.parameters)


def json_value(schema: Any) -> str:
    """Returns a JSON value that follows a schema, in Lark's notation."""
    spaced = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return "%json " + json.dumps(spaced | schema if isinstance(schema, dict) else schema)


def literal(text: str) -> str:
    """Returns a string in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)


def read_calls(source: OutputBuffer, family: ToolCallFormat, tools: Mapping[str, Tool]) -> Reading[None]:
    """Reads an answer to its end: text and calls.

    Args:
        tools: by name.
    """
    reader = CallReader(source, tools)
    mark = yield from _find_first(reader, family)
    while mark is not None:
        try:
            yield from family.read(reader, mark)
        except MalformedError:
            if (part := reader.give_up()) is not None:
                yield part
        else:
            source.keep()
        mark = yield from _find_next(reader, family)


def _find_first(reader: CallReader, family: ToolCallFormat) -> Reading[str | None]:
    if family.is_bare:
        yield from reader.source.skip_space()
        if (yield from reader.source.peek()) == "{":
            return ""
    return (yield from _find_next(reader, family))


def _find_next(reader: CallReader, family: ToolCallFormat) -> Reading[str | None]:
    return (yield from reader.source.pass_text(family.marks, drops_last_space=reader.num_calls > 0))


# Detects a model's tool-call format from its chat template.


_SIGNS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("deepseek", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4", ("<|tool|>", "<|/tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters": ', "<|eot_id|>")),
)
"""(family, what its template has); the first of which everything is there wins."""


def detect_family(template: str) -> str | None:
    """Returns the name of a family, or None for a template that shows none."""
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), None)
