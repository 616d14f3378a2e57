"""Converts a body of /v1/responses to a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cloister.server.parse import check_fields
from cloister.server.responses.schemas import (
    CallItem,
    CallOutputItem,
    Choice,
    FunctionTool,
    InputImage,
    InputPart,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    SchemaFormat,
    ToolChoiceAllowed,
    ToolChoiceFunction,
)
from cloister.server.schemas import ChatBody


def to_chat(body: ResponsesBody) -> ChatBody:
    """Returns the request as one of /v1/chat/completions."""
    fields: dict[str, Any] = {
        "messages": _messages(body),
        "model": body.model,
        "stream": body.stream,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        fields["response_format"] = _format(body)
    return check_fields(fields, ChatBody)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for item in body.input:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds an item. Consecutive reasoning, text and calls form one message of the assistant."""
    match item:
        case MessageItem(role="assistant"):
            message = _assistant(messages, "content")
            message["content"] = _parts(item.content)
        case MessageItem():
            messages.append({"role": item.role, "content": _parts(item.content)})
        case ReasoningItem():
            # Clients send back reasoning without visible content; it is ignored here too.
            if reasoning := _text(item.content or item.summary or ()):
                _assistant(messages, "reasoning_content")["reasoning_content"] = reasoning
        case CallItem():
            call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case CallOutputItem():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _assistant(messages: list[dict[str, Any]], starts: str = "") -> dict[str, Any]:
    """Returns the assistant's current message, or a new one; a second text or reasoning also starts a new one."""
    if not messages or messages[-1]["role"] != "assistant" or starts in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(parts: Iterable[InputPart]) -> str:
    return "".join(part.text for part in parts)


def _parts(parts: Iterable[InputPart | InputImage]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, InputPart)
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
        for part in parts
    ]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": function}


def _choice(choice: Choice) -> dict[str, Any]:
    match choice:
        case ToolChoiceFunction():
            return _named(choice)
        case ToolChoiceAllowed():
            allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return {"type": choice.type}


def _named(choice: ToolChoiceFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _format(body: ResponsesBody) -> dict[str, Any]:
    assert body.text is not None
    assert body.text.format is not None
    form = body.text.format
    if not isinstance(form, SchemaFormat):
        return {"type": form.type}
    schema = {"name": form.name, "schema": form.schema_, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": schema}
