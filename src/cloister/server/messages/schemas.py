"""Requests of /v1/messages as strict models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from cloister.server.fields import Refused
from cloister.server.rules import MESSAGE_PARAM, TOOL_CHOICE_PARAM
from cloister.server.schemas import INT32, MAX_MESSAGES, MAX_STOP, MAX_TOOLS, FunctionName, StopString, Strict

REFUSED: Final[Mapping[str, Refused]] = {
    "container": Refused("no code runs on this server"),
    "mcp_servers": Refused("this server calls no other servers", ([],)),
    "context_management": Refused("this server does not shorten conversations"),
    "service_tier": Refused("a request's class comes from its API key", ("auto", "standard_only")),
}


class CacheControl(Strict):
    """Where a client would like a prefix to be cached. All prefixes are, as far as the profile allows it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Strict):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """Text; the models here read nothing else."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolUseBlock(_Block):
    """A call that the model made before."""

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
    """What a call brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    """What the model said to itself before."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]
Blocks = Annotated[list[Block], Field(max_length=MAX_MESSAGES)]


class MessageParam(Strict):
    """What somebody said."""

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
    """Whether the model reasons first; how long is its own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, lt=INT32)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """A JSON schema that the answer has to follow."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The form of the answer, and how long the model may reason."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh"] | None = None


class MetadataParam(Strict):
    """Of no effect here."""

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
