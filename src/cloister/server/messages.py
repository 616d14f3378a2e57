"""Anthropic's Messages API: schemas, requests and streamed replies."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from cloister.server.answers import Usage
from cloister.server.choices import Turn
from cloister.server.errors import invalid
from cloister.server.jobs import GenerationJob
from cloister.server.parse import Refused, check_fields
from cloister.server.rules import MESSAGE_PARAM, TOOL_CHOICE_PARAM
from cloister.server.schemas import INT32, MAX_MESSAGES, MAX_STOP, MAX_TOOLS, ChatBody, FunctionName, StopString, Strict
from cloister.server.stream import EventTemplate, named_events
from cloister.text.parts import Arguments, CallBegun, CallBroken, CallEnded, Part, Reasoning, Text
from cloister.types.errors import CloisterError

# Requests of /v1/messages as strict models.


REFUSED: Final[Mapping[str, Refused]] = {
    "container": Refused("no code runs on this server"),
    "mcp_servers": Refused("this server calls no other servers", ([],)),
    "context_management": Refused("this server does not shorten conversations"),
    "service_tier": Refused("a request's class comes from its API key", ("auto", "standard_only")),
}


class CacheControl(Strict):
    """A cache breakpoint. All prefixes are cached anyway, if the profile permits it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ImageData(Strict):
    """The image itself, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class ImageAddress(Strict):
    """The URL of an image, for a server that fetches images (`remote_images`)."""

    type: Literal["url"]
    url: str


ImageSource = Annotated[ImageData | ImageAddress, Field(discriminator="type")]


class ImageBlock(_Block):
    """An image in a message of the user, for a model that sees."""

    type: Literal["image"]
    source: ImageSource


class ToolUseBlock(_Block):
    """An earlier call of the model."""

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)]
Texts = Annotated[TextBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | TextBlocks)]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """Earlier reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]
Blocks = Annotated[list[Block], Field(max_length=MAX_MESSAGES)]


class MessageParam(Strict):
    """A message of the conversation."""

    model_config = MESSAGE_PARAM

    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks, BeforeValidator(_as_blocks, json_schema_input_type=str | Blocks)]


class ToolParam(_Block):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoiceParam(Strict):
    """Whether the model may or must call, and whether more than once."""

    model_config = TOOL_CHOICE_PARAM

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Strict):
    """Whether the model reasons first; the token budget is ignored."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, lt=INT32)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The form of the answer, and how long the model may reason."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh"] | None = None


class MetadataParam(Strict):
    """Without effect here."""

    user_id: str | None = None


class CountBody(_Block):
    """Body of /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: Texts | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody):
    """Body of /v1/messages."""

    max_tokens: int = Field(ge=1, lt=INT32)
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=INT32)
    metadata: MetadataParam | None = None


# Errors as clients of the Messages API read them: {"type": "error", "error": {type, message}}.


PREFIX: Final = "/v1/messages"
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_object(status: int, message: str) -> dict[str, Any]:
    """Returns the body of an error reply."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


# Converts a body of /v1/messages to a conversation.


def to_chat(body: CountBody) -> ChatBody:
    """Returns the request as one of /v1/chat/completions.

    Raises:
        InvalidRequestError: blocks are misplaced, or fields contradict each other.
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
            case ImageBlock():
                raise invalid(f"`{path}.content` has an image; these belong to the role user.", f"{path}.content")
    return made if "content" in made or "tool_calls" in made else made | {"content": ""}


def _others(message: MessageParam, path: str) -> list[dict[str, Any]]:
    """Splits a message of a user into tool results and text."""
    made: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case ToolResultBlock() if message.role == "user":
                made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or [])})
            case TextBlock() | ImageBlock() if isinstance(block, TextBlock) or message.role == "user":
                if not made or made[-1]["role"] != message.role:
                    made.append({"role": message.role, "content": []})
                made[-1]["content"].append(_part(block))
            case _:
                raise invalid(f"`{path}.content` has a block that does not belong to its role.", f"{path}.content")
    return made or [{"role": message.role, "content": ""}]


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, ImageAddress) else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)


def _choice(choice: ToolChoiceParam) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if (choice.name is None) == (choice.type == "tool"):
        raise invalid("`tool_choice.name` is required for the type tool, and only there.", "tool_choice.name")
    if choice.type == "tool":
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return fields | {"tool_choice": "required" if choice.type == "any" else choice.type}


# Converts the parts of an answer to message blocks and streamed events.


Event = dict[str, Any]

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: Final = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageWriter:
    """Writes one message.

    A call is written once it is complete: clients that accumulate its JSON cannot discard an incomplete one.
    """

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._pieces: list[str] = []
        self._name = ""
        self._arguments: list[str] = []
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._template: EventTemplate | None = None

    def begin(self, usage: Usage) -> Iterator[Event]:
        """Yields the events before the first block."""
        yield {"type": "message_start", "message": self.message(usage)}
        yield {"type": "ping"}

    def write(self, turn: Turn) -> bytes:
        """Returns the events of one step. Most only add text to the open block."""
        template = self._template if self._is_open and self._blocks[-1]["type"] == "text" else None
        if template is not None and (text := turn.only_text) is not None:
            self._pieces.append(text)
            return template.fill(text)
        return named_events(self.add(turn))

    def add(self, turn: Turn) -> Iterator[Event]:
        """Yields the events of one step's delta."""
        for part in turn.parts:
            yield from self._add(part)
        if turn.finish_reason is not None:
            self._stop_reason = _STOP_REASONS[turn.finish_reason]
            if turn.finish_reason == "stop" and isinstance(turn.output.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", turn.output.stop_reason

    def end(self, usage: Usage) -> Iterator[Event]:
        """Yields the end of the last block and of the message."""
        yield from self._close()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def message(self, usage: Usage) -> dict[str, Any]:
        """Returns the current message."""
        return {
            "id": self._job.job_id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model_name,
            "content": list(self._blocks),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage(usage),
        }

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Text(text) | CallBroken(_, text):
                yield from self._add_text({"type": "text", "text": ""}, text)
            case Reasoning(text):
                yield from self._add_text({"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallBegun(_, name):
                self._name, self._arguments = name, []
            case Arguments(_, text):
                self._arguments.append(text)
            case CallEnded():
                yield from self._add_call("".join(self._arguments))

    def _add_text(self, block: dict[str, Any], text: str) -> Iterator[Event]:
        if not self._is_open or self._blocks[-1]["type"] != block["type"]:
            yield from self._open(block)
        kind, name = _DELTAS[block["type"]]
        self._pieces.append(text)
        yield self._delta({"type": kind, name: text})

    def _add_call(self, arguments: str) -> Iterator[Event]:
        call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": self._name, "input": {}}
        yield from self._open(call)
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        self._blocks[-1]["input"] = json.loads(arguments)
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._is_open, self._pieces = True, []
        self._blocks.append(block)
        if block["type"] == "text":
            self._template = EventTemplate(lambda text: self._delta({"type": "text_delta", "text": text}), named_events)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        """Ends the open block, if any."""
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] in _DELTAS:
            block[_DELTAS[block["type"]][1]] = "".join(self._pieces)
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts in this API's format: cached tokens are not included in the input tokens."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def write_failure(error: CloisterError) -> bytes:
    """Returns the event that ends a failed stream."""
    return named_events([error_object(error.status, error.message)])
