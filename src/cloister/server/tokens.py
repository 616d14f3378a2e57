"""What tokens a text is, and what text tokens are: /tokenize, /detokenize and /tokenizer_info, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import ConfigDict, FailFast, Field, JsonValue

from cloister.server.conversation import template_messages
from cloister.server.errors import invalid
from cloister.server.parse import parse_body
from cloister.server.prompts import PromptReader
from cloister.server.schemas import MAX_MESSAGES, Message, Strict, TokenId


def _having(name: str, kind: str, *absent: str) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": kind}, **{other: {"type": "null"} for other in absent}}}


class TokenizeBody(Strict):
    """Body of /tokenize: a text, or the messages of a chat.

    `add_special_tokens` defaults to true for a text, and to false for a chat, whose template writes them.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                _having("prompt", "string", "messages", "add_generation_prompt"),
                _having("messages", "array", "prompt"),
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


class Tokenized(msgspec.Struct, frozen=True):
    """Reply of /tokenize; `token_strs` is null unless it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """Reply of /detokenize."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Reply of /tokenizer_info: the tokens that begin and end a text, null where the model has none."""

    bos_token: str | None
    eos_token: str | None
    vocab_size: int
    max_model_len: int


def tokenize(reader: PromptReader, raw: bytes) -> Tokenized:
    """Answers a body of /tokenize.

    Raises:
        InvalidRequestError, NotFoundError: it cannot be answered; the message says why.
    """
    body = parse_body(raw, TokenizeBody)
    reader.find_adapter(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Send either `prompt` or `messages`.", "prompt", "missing_required_parameter")
    if body.prompt is not None:
        if body.add_generation_prompt is not None:
            raise invalid("`add_generation_prompt` needs `messages`.", "add_generation_prompt")
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        text, special = _render(reader, body), bool(body.add_special_tokens)
    tokens = reader.tokenizer.encode(text, add_special_tokens=special)
    names = [_name(reader, token) for token in tokens] if body.return_token_strs else None
    return Tokenized(len(tokens), reader.model.max_model_len, tokens, names)


def detokenize(reader: PromptReader, raw: bytes) -> Detokenized:
    """Answers a body of /detokenize; errors as in `tokenize`."""
    body = parse_body(raw, DetokenizeBody)
    reader.find_adapter(body.model)
    if not all(token < reader.vocab_size for token in body.tokens):
        raise invalid(f"`tokens` has a token id that is not in [0, {reader.vocab_size}).", "tokens", "token_id_out_of_range")
    return Detokenized(reader.tokenizer.decode(body.tokens, skip_special_tokens=False))


def tokenizer_info(reader: PromptReader) -> TokenizerInfo:
    """Returns what a client needs that counts tokens itself."""
    tokenizer = reader.tokenizer
    bos, eos = (
        None if token is None else tokenizer.decode([token], skip_special_tokens=False)
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    return TokenizerInfo(bos, eos, reader.vocab_size, reader.model.max_model_len)


def _render(reader: PromptReader, body: TokenizeBody) -> str:
    messages: list[dict[str, Any]] = template_messages(body.messages or [])
    return reader.manner.template.render(messages, add_generation_prompt=body.add_generation_prompt is not False)


def _name(reader: PromptReader, token: int) -> str:
    """A token as text; bytes that are no whole character show as U+FFFD."""
    return reader.tokenizer.token_bytes(token).decode(errors="replace")
