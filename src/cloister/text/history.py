"""Normalises past messages, tool calls and results for the chat template of one model.

Templates agree on messages of text, and on little else: arguments as an object or as JSON, ids of nine letters, content that
is null beside calls, tools in a variable, in the system message, or nowhere at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Message = Mapping[str, Any]

_READS_TOOLS: Final = re.compile(r"(?<![\w.'\"])tools\b(?!['\"])")
_TOOLS_OF_MESSAGE: Final = re.compile(r"message(\[['\"]tools['\"]\]|\.tools\b)")
_READS_NULL: Final = re.compile(r"content['\"\]]*\s+is\s+(not\s+)?none")
_WANTS_SHORT_IDS: Final = re.compile(r"length\s*!=\s*9")
_READS_PARTS: Final = re.compile(r"for\s+\w+\s+in\s+message(\[['\"]content['\"]\]|\.content\b)")
_READS_TEXT: Final = re.compile(r"content(['\"]\])?\s+is\s+(not\s+)?string")

_RESULT: Final = "<tool_response>"
_HOW_TO_CALL: Final = """\
# Tools

You may call these functions; each is described as JSON:
{tools}

To call one, write its name and its arguments in this form and nothing after it:
{example}"""
EXAMPLE: Final = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
"""How calls look, unless it is said otherwise."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What one template wants.

    Attributes:
        takes_tools: it has a place for tools.
        has_tools_in_message: that place is the system message.
        knows_calls: it writes calls and their results by itself.
        reads_null: it tells calls from text by content that is null.
        wants_short_ids: ids of calls have nine letters.
        wants_parts: it reads content as a list of parts only, as those of some models that see.
    """

    takes_tools: bool
    has_tools_in_message: bool
    knows_calls: bool
    reads_null: bool
    wants_short_ids: bool
    wants_parts: bool

    @classmethod
    def of(cls, source: str) -> Habits:
        """Reads them from a template's source."""
        in_message = _TOOLS_OF_MESSAGE.search(source) is not None
        return cls(
            takes_tools=in_message or _READS_TOOLS.search(source) is not None,
            has_tools_in_message=in_message,
            knows_calls="tool_calls" in source,
            reads_null=_READS_NULL.search(source) is not None,
            wants_short_ids=_WANTS_SHORT_IDS.search(source) is not None,
            wants_parts=_READS_PARTS.search(source) is not None and _READS_TEXT.search(source) is None,
        )

    def fit(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, example: str, *, in_system: bool = True
    ) -> list[Message]:
        """Returns the messages as the template wants them.

        Args:
            example: how a call looks, for a template without a place for tools.
            in_system: tools without a place go into the system message; else into the first of the user.
        """
        fitted = self._fit_all(messages, tools, example, in_system=in_system)
        return [_in_parts(message) for message in fitted] if self.wants_parts else fitted

    def _fit_all(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, example: str, *, in_system: bool
    ) -> list[Message]:
        fitted: list[Message] = [self._fit_message(message) for message in _with_names(messages)]
        if not self.knows_calls:
            fitted = _joined(_without_calls(message) for message in fitted)
        if tools and not self.takes_tools:
            described = _describe(tools, example)
            return _with_system(fitted, described) if in_system else _with_user(fitted, described)
        if tools and self.has_tools_in_message:
            return _with_system(fitted, "", tools=json.dumps(tools, ensure_ascii=False))
        return fitted

    def _fit_message(self, message: Message) -> Message:
        fitted = dict(message)
        if fitted.get("content") is None and not (self.reads_null and fitted.get("tool_calls")):
            fitted["content"] = ""
        if self.wants_short_ids and fitted.get("tool_call_id"):
            fitted["tool_call_id"] = _short_id(fitted["tool_call_id"])
        if self.wants_short_ids and fitted.get("tool_calls"):
            fitted["tool_calls"] = [{**call, "id": _short_id(str(call.get("id")))} for call in fitted["tool_calls"]]
        return fitted


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _merge(contents: Sequence[Any], between: str) -> Any:
    """Returns contents, texts or lists of parts, as one."""
    if all(isinstance(content, str) for content in contents):
        return between.join(contents)
    parts: list[Mapping[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": between}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def with_objects(messages: Iterable[Message]) -> list[Message]:
    """Returns messages whose calls have their arguments as objects in place of JSON, as most templates want them."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def completed(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns tools with everything that a template may take for granted: a description, and properties."""
    return [{**tool, "function": _complete(tool["function"])} if "function" in tool else tool for tool in tools]


def _complete(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {}} | dict(function.get("parameters") or {})
    return {"description": "", **function, "parameters": parameters}


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Gives results the name of the function that was called, which the API leaves out and some templates ask for."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or () if "id" in call}
        found = names.get(message.get("tool_call_id") or "")
        named.append(message if found is None or message.get("name") else {**message, "name": found})
    return named


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, Mapping) else call


def _short_id(long: str) -> str:
    """An id that is the same for the call and its result, whatever made the long one."""
    return long if len(long) == 9 and long.isalnum() else hashlib.sha256(long.encode()).hexdigest()[:9]


def _without_calls(message: Message) -> Message:
    """Writes calls and results as text, for a template that knows neither."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"{_RESULT}{message['content']}</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(_write_call(call) for call in message["tool_calls"])
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], calls)))}


def _write_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": {json.dumps(function["name"])}, "arguments": {written or "{}"}}}</tool_call>'


def _describe(tools: Sequence[Mapping[str, Any]], example: str) -> str:
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return _HOW_TO_CALL.format(tools=described, example=example)


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Joins results that follow each other and what the user says then: many templates want turns to alternate."""
    groups: list[list[Message]] = []
    for message in messages:
        first = groups[-1][0] if groups else {}
        if message.get("role") == first.get("role") == "user" and str(first["content"]).startswith(_RESULT):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(messages: Sequence[Message]) -> Message:
    return {**messages[0], "content": _merge([message["content"] for message in messages], "\n")}


def _with_user(messages: list[Message], text: str) -> list[Message]:
    """Puts a text before what the user says first."""
    place = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
    told = {**messages[place], "content": _merge([text, messages[place]["content"]], "\n\n")}
    return [*messages[:place], told, *messages[place + 1 :]]


def _with_system(messages: list[Message], text: str, **more: Any) -> list[Message]:
    """Adds to the system message, which comes to be if there is none."""
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": text, **more}, *messages]
    first = messages[0]
    return [{**first, "content": "\n\n".join(filter(None, (first["content"], text))), **more}, *messages[1:]]
