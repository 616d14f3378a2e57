"""Responses of the OpenAI API as structs, including log-probabilities. Unset fields that clients expect are null; others are
omitted."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cloister.types.request import TokenLogprobs


class CachedTokens(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where prompt tokens came from; `document_tokens` are those of documents that were encoded separately."""

    cached_tokens: int
    document_tokens: int = 0


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
    """Log-probabilities of an answer; `content` has a `TokenPosition` for each token, already as JSON."""

    content: list[msgspec.Raw]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer; reasoning is sent under the two names that clients use."""

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
    """A piece of a tool call: id, type and name come first, once, followed by pieces of the arguments."""

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
    """One event of a chat stream; `usage` is null, or omitted if the client did not request it."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The older format: parallel lists. Offsets count characters of the choice's text; `top_logprobs` are already JSON."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[msgspec.Raw | None]
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


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that the reply repeats (`echo`).

    Attributes:
        first_token: bytes of the first token; the engine's log-probabilities begin with the second token.
    """

    text: str
    first_token: bytes


LOWEST_LOGPROB: Final = -9999.0
"""Replacement for minus infinity, which JSON lacks; the OpenAI API uses the same value."""
_PROMPT_PIECE: Final = 64
"""Positions of a prompt that are written at a time."""
_encode: Final = msgspec.json.Encoder().encode


def chat_logprobs(positions: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Returns the format of /v1/chat/completions. A token that is not a whole character is shown as U+FFFD, with its bytes.

    Each position becomes JSON as it comes: kept as objects, those of a whole reply would take seven times the memory, and
    writing them all at its end would hold up the event loop.
    """
    return ChatLogprobs([msgspec.Raw(_encode(_chat_position(position))) for position in positions])


def _chat_position(position: TokenLogprobs) -> TokenPosition:
    top = [
        TokenChoice(text.decode(errors="replace"), _finite(logprob), list(text))
        for (_, logprob), text in zip(position.top, position.top_texts, strict=True)
    ]
    text = position.text
    return TokenPosition(text.decode(errors="replace"), _finite(position.logprob), list(text), top)


class LegacyLogprobs:
    """The format of /v1/completions for one choice, over all chunks, so that offsets continue.

    Args:
        echo: the prompt, if the choice's text begins with it.
    """

    def __init__(self, echo: Echo | None = None) -> None:
        self._echo = echo
        self._offset = len(echo.text) if echo is not None else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(self, positions: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Returns the prompt's part; its first token has no log-probability."""
        return joined(*self.write_prompt(positions))

    def write_prompt(self, positions: Sequence[TokenLogprobs | None]) -> Iterator[CompletionLogprobs]:
        """Yields the prompt's part in short pieces."""
        assert self._echo is not None
        known = [position for position in positions if position is not None]
        offsets = _prompt_offsets(self._echo, known)
        yield CompletionLogprobs([_token_name(self._echo.first_token)], [None], [None], offsets[:1])
        for start in range(0, len(known), _PROMPT_PIECE):
            end = start + _PROMPT_PIECE
            yield _legacy(known[start:end], offsets[start + 1 : end + 1])

    def add(self, positions: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Returns the part for the next tokens of the answer."""
        return _legacy(positions, [self._advance(position.text) for position in positions])

    def _advance(self, text: bytes) -> int:
        here = self._offset
        self._offset += len(self._decoder.decode(text))
        return here


def _prompt_offsets(echo: Echo, positions: Sequence[TokenLogprobs]) -> list[int]:
    """Offsets of the prompt's tokens in its text. A token without text, such as BOS, has no width."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, here = [], 0
    for text in (echo.first_token, *(position.text for position in positions)):
        offsets.append(here)
        shown = decoder.decode(text)
        # Some tokenizers put a space before the first word; the text that the client sent has none.
        widths = (len(form) for form in (shown, shown.removeprefix(" ")) if echo.text.startswith(form, here))
        here += next(widths, 0)
    return offsets


def _legacy(positions: Sequence[TokenLogprobs], offsets: list[int]) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_token_name(position.text) for position in positions],
        token_logprobs=[_finite(position.logprob) for position in positions],
        top_logprobs=[msgspec.Raw(_encode(_top_by_name(position))) for position in positions],
        text_offset=offsets,
    )


def joined(*parts: CompletionLogprobs) -> CompletionLogprobs:
    """Joins the parts of one choice."""
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _top_by_name(position: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the chosen one, as in the older API: up to one more than requested."""
    texts = zip(position.top, position.top_texts, strict=True)
    top = {_token_name(text): _finite(logprob) for (_, logprob), text in texts}
    top.setdefault(_token_name(position.text), _finite(position.logprob))
    return top


def _token_name(text: bytes) -> str:
    """A token's text; one that is not a whole character is spelled byte by byte, so that names are unique."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
