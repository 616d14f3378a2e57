"""From a body of /v1/messages to the conversation that it is."""

from __future__ import annotations

import json
from typing import Any

from cloister.server.errors import invalid
from cloister.server.messages.schemas import (
    CountBody,
    MessageParam,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolResultBlock,
    ToolUseBlock,
)
from cloister.server.parse import check_fields
from cloister.server.schemas import ChatBody


def to_chat(body: CountBody) -> ChatBody:
    """Returns the request as one of /v1/chat/completions.

    Raises:
        InvalidRequestError: blocks stand where they cannot, or fields contradict each other.
    """
    messages = _messages(body)
    fields: dict[str, Any] = {"messages": messages, "model": body.model}
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in body.tools
        ]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    if body.thinking is not None and body.thinking.type != "adaptive":
        fields["reasoning_effort"] = "none" if body.thinking.type == "disabled" else _effort(body)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    return check_fields(fields, ChatBody)


def _effort(body: CountBody) -> str:
    return (body.output_config.effort if body.output_config is not None else None) or "medium"


def _messages(body: CountBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for i, message in enumerate(body.messages):
        if message.role == "assistant":
            messages.append(_assistant(message, f"messages[{i}]"))
        else:
            messages += _others(message, f"messages[{i}]")
    return messages


def _assistant(message: MessageParam, path: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant"}
    for block in message.content:
        match block:
            case TextBlock():
                made["content"] = made.get("content", "") + block.text
            case ThinkingBlock():
                made["reasoning_content"] = made.get("reasoning_content", "") + block.thinking
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                made.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise invalid(f"`{path}.content` has a result of a tool; these belong to the role user.", f"{path}.content")
    return made if "content" in made or "tool_calls" in made else made | {"content": ""}


def _others(message: MessageParam, path: str) -> list[dict[str, Any]]:
    """Returns a message of a user as the results of tools and the text that it is made of."""
    made: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case ToolResultBlock() if message.role == "user":
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or [])})
            case TextBlock():
                if not made or made[-1]["role"] != message.role:
                    made.append({"role": message.role, "content": ""})
                made[-1]["content"] += block.text
            case _:
                raise invalid(f"`{path}.content` has a block that does not belong to its role.", f"{path}.content")
    return made or [{"role": message.role, "content": ""}]


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _choice(choice: ToolChoiceParam) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if (choice.name is None) == (choice.type == "tool"):
        raise invalid("`tool_choice.name` is required for the type tool, and only there.", "tool_choice.name")
    if choice.type == "tool":
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}
