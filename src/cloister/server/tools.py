"""The tools of a request: which there are, which may be called, and whether one must be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cloister.server.errors import invalid
from cloister.server.schemas import AllowedChoice, ChatBody, FunctionSpec, NamedChoice
from cloister.text import grammar as grammars
from cloister.text.tools import Tool, ToolCallFormat
from cloister.text.tools.base import json_value
from cloister.types.grammar import Grammar, GrammarKind

_NO_PARAMETERS: Final = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    Attributes:
        offered: what the model is told of.
        callable: those of them that it may call, by name; none if it may not call.
        is_forced: it must call.
        is_one: it may call once only.
        places: where each tool's parameters stand in the request, for errors.
    """

    offered: tuple[Tool, ...] = ()
    callable: Mapping[str, Tool] = field(default_factory=dict)
    is_forced: bool = False
    is_one: bool = False
    places: Mapping[str, str] = field(default_factory=dict)

    def to_template(self) -> list[dict[str, Any]] | None:
        """Returns the tools as chat templates take them."""
        return [tool.to_template() for tool in self.offered] or None

    def grammar(self, family: ToolCallFormat, spell: Callable[[str], str], answer: Grammar | None) -> Grammar | None:
        """Returns the form of an answer that must call, or may call and has a form otherwise; else what is asked for.

        Args:
            spell: writes a mark in Lark's notation.
            answer: the form that the client asks for.

        Raises:
            InvalidRequestError: the answer's form is one that calls cannot stand beside.
        """
        if not self.callable or (answer is None and not self.is_forced):
            return answer
        tools = [_checked(tool, self.places[name]) for name, tool in self.callable.items()]
        source = family.grammar(tools, spell, is_one=self.is_one)
        if answer is not None and not self.is_forced:
            source = source.replace("start: ", "calls: ", 1) + f"\nstart: calls | answer\nanswer: {_json_rule(answer)}"
        return Grammar(GrammarKind.LARK, source)


def read_tools(body: ChatBody) -> ToolUse:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidRequestError: they contradict each other, or a tool's parameters are no schema of an object.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice is not None and choice.type not in ("none", "auto"):
            raise invalid("`tool_choice` asks for a call and there are no `tools`; send some.", "tool_choice")
        return ToolUse()
    tools = {spec.function.name: _tool(spec.function, f"tools[{i}].function") for i, spec in enumerate(body.tools)}
    if len(tools) < len(body.tools):
        raise invalid("Two of `tools` have the same name; give each its own.", "tools", "invalid_value")
    if choice is not None and choice.type == "none":
        return ToolUse()
    may, must = tools, choice is not None and choice.type == "required"
    if isinstance(choice, NamedChoice):
        may, must = _some(tools, [choice]), True
    elif isinstance(choice, AllowedChoice):
        may, must = _some(tools, choice.allowed_tools.tools), choice.allowed_tools.mode == "required"
    is_one = body.parallel_tool_calls is False or isinstance(choice, NamedChoice)
    places = {spec.function.name: f"tools[{i}].function.parameters" for i, spec in enumerate(body.tools)}
    return ToolUse(tuple(tools.values()), may, must, is_one, places)


def _tool(function: FunctionSpec, path: str) -> Tool:
    parameters = function.parameters or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise invalid(f"`{path}.parameters` must be a JSON schema of type object.", f"{path}.parameters", "invalid_value")
    if not isinstance(parameters.get("properties", {}), dict):
        raise invalid(f"`{path}.parameters` must have an object of `properties`.", f"{path}.parameters", "invalid_value")
    return Tool(function.name, {"type": "object"} | parameters, function.description)


def _json_rule(answer: Grammar) -> str:
    if answer.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        raise invalid("An answer in a form other than JSON cannot call; set `tool_choice` to none or required.", "tool_choice")
    return json_value(json.loads(answer.source or '{"type": "object"}'))


def _checked(tool: Tool, param: str) -> Tool:
    """Returns a tool whose parameters can be followed by a grammar."""
    schema = grammars.check_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(tool.parameters)), param)
    return replace(tool, parameters=json.loads(schema.source))


def _some(tools: Mapping[str, Tool], choices: Sequence[NamedChoice]) -> dict[str, Tool]:
    names = [choice.function.name for choice in choices]
    if not all(name in tools for name in names):
        raise invalid("`tool_choice` names a tool that is not among `tools`.", "tool_choice", "invalid_value")
    return {name: tools[name] for name in names}
