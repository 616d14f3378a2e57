"""Answers of the OpenAI API as structs. Fields that a client expects to find are null; the others are left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a whole reply; `cached_tokens` were read from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TokenChoice(msgspec.Struct, frozen=True):
    """One candidate at one position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenPosition(msgspec.Struct, frozen=True):
    """The chosen token at one position, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenChoice]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenPosition]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """What was answered; reasoning has two names, since clients know it by one or the other."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of a call: id, type and name come first, once, and then the arguments in pieces."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a chat stream; `usage` is null, or left out when the client did not ask for it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The older format: parallel lists. Offsets count characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    """A reply of /v1/completions, or one event of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int | None
    default_max_tokens: int | None
    root: str
    parent: str | None = None
    permission: None = None
    owned_by: str = "cloister"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"
