"""Requests of /v1/responses: their schemas, and their conversion to requests of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from cloister.server.parse import Refused, check_fields
from cloister.server.rules import TOOLS
from cloister.server.schemas import (
    BELOW_WINDOW,
    INT32,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_TOOLS,
    CacheSalt,
    ChatBody,
    FunctionName,
    MetadataText,
    PromptCacheKey,
    Strict,
)

_TEXT: Final = "models here read and write text only"
_STATELESS: Final = "this server keeps nothing; send the whole conversation in `input`"

REFUSED: Final[Mapping[str, Refused]] = {
    "previous_response_id": Refused(_STATELESS),
    "conversation": Refused(_STATELESS),
    "store": Refused("nothing is kept here, so there is nothing to store in", (False,)),
    "background": Refused("nothing is kept here, so that an answer has to be waited for", (False,)),
    "prompt": Refused("this server has no stored prompts"),
    "context_management": Refused("this server does not shorten conversations"),
    "truncation": Refused("a conversation that is too long is refused, not cut", ("disabled",)),
    "max_tool_calls": Refused("no tool runs on this server, so there is nothing to count"),
    "moderation": Refused("this server does not moderate"),
    "image": Refused(_TEXT),
    "service_tier": Refused("a request's class comes from its API key", ("auto", "default")),
}

Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(Strict):
    """A text part of a content. The last two fields occur in answers that are sent back; no prompt has them."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any] | None, Field(exclude=True)] = None


def _as_parts(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


class InputImage(Strict):
    """A part of a user's content that is an image, in a data URL, for a model that sees."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


InputParts = Annotated[list[InputPart], Field(max_length=MAX_MESSAGES)]
MessageParts = Annotated[list[Annotated[InputPart | InputImage, Field(discriminator="type")]], Field(max_length=MAX_MESSAGES)]
MessageContent = Annotated[MessageParts, BeforeValidator(_as_parts, json_schema_input_type=str | MessageParts)]
Parts = Annotated[InputParts, BeforeValidator(_as_parts, json_schema_input_type=str | InputParts)]


class _Item(Strict):
    """Common fields of all items; client metadata, without effect."""

    id: str | None = None
    status: Status | None = None


class MessageItem(_Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: MessageContent
    phase: str | None = None


class CallItem(_Item):
    """An earlier call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    namespace: None = None
    caller: None = None


class CallOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(_Item):
    """Earlier reasoning of the model."""

    type: Literal["reasoning"]
    summary: InputParts | None = None
    content: InputParts | None = None
    encrypted_content: Annotated[str | None, Field(exclude=True)] = None


def _with_type(value: object) -> object:
    return {"type": "message"} | value if isinstance(value, dict) and "role" in value else value


Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_with_type),
]


def _as_items(value: object) -> object:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceMode(Strict):
    """Whether the model may or must call, as a single word."""

    type: Literal["none", "auto", "required"]


class ToolChoiceFunction(Strict):
    """The model must call this function."""

    type: Literal["function"]
    name: FunctionName


class ToolChoiceAllowed(Strict):
    """The model may or must call some of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoiceFunction], Field(min_length=1, max_length=MAX_TOOLS)]


def _as_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


AnyChoice = Annotated[ToolChoiceMode | ToolChoiceFunction | ToolChoiceAllowed, Field(discriminator="type")]
Choice = Annotated[
    AnyChoice, BeforeValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | AnyChoice)
]


class TextFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] = "answer"
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextSettings(Strict):
    """Format of the answer."""

    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(Strict):
    """How long the model may reason; summaries are not made, the reasoning itself is in the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Strict):
    """Additional content of a stream."""

    include_obfuscation: bool | None = None


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(Strict):
    """Body of /v1/responses."""

    model_config = TOOLS

    input: Annotated[Items, BeforeValidator(_as_items, json_schema_input_type=str | Items)]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT32, json_schema_extra=BELOW_WINDOW)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Annotated[list[Include], Field(max_length=MAX_TOOLS)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    cache_salt: CacheSalt | None = None
    prompt_cache_key: PromptCacheKey | None = None

    # Known fields without effect here: type-checked and ignored.
    user: str | None = None
    metadata: Annotated[dict[str, MetadataText], Field(max_length=MAX_METADATA)] | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer includes log-probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


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
        "cache_salt": body.cache_salt,
        "prompt_cache_key": body.prompt_cache_key,
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
