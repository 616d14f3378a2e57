"""`/tokenize`, `/detokenize` and `/tokenizer_info`: tokens of texts and texts of tokens, in vLLM's shape and llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from pydantic import ConfigDict, FailFast, Field, JsonValue
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.conversation import template_messages
from cloister.server.errors import invalid
from cloister.server.parse import parse_body
from cloister.server.prompts import PromptReader
from cloister.server.route_table import RouteTable
from cloister.server.schemas import MAX_MESSAGES, Message, Strict, TokenId
from cloister.server.state import json_response, state_of


def _having(name: str, kind: str, *absent: str) -> JsonValue:
    return {"required": [name], "properties": {name: {"type": kind}, **{other: {"type": "null"} for other in absent}}}


_LLAMACPP: Final = ("add_special", "parse_special", "with_pieces")


MAX_SHOWN: Final = 2**17
"""Tokens whose texts one reply shows; each takes up to 300 bytes until it is sent. `/detokenize` takes a context window too."""


class TokenizeBody(Strict):
    """Body of /tokenize: a text or the messages of a chat, as vLLM names them, or a text as llama.cpp does (`content`).

    `add_special_tokens` defaults to true for a text, and to false for a chat, whose template writes them. The next fields apply
    to `content`: `add_special` defaults to false, `parse_special` (spellings of control tokens become control tokens) to true.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                _having("prompt", "string", "messages", "content", "add_generation_prompt", *_LLAMACPP),
                _having("messages", "array", "prompt", "content", *_LLAMACPP),
                _having("content", "string", "prompt", "messages", "add_generation_prompt", "add_special_tokens"),
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


class Piece(msgspec.Struct, frozen=True):
    """A token and its text, or its bytes if they are not whole characters, as in llama.cpp."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, frozen=True):
    """Reply of /tokenize; `tokens` are pieces, and `token_strs` is not null, if requested."""

    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """Reply of /detokenize: the text under vLLM's name, and under llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct, frozen=True):
    """Reply of /tokenizer_info: the tokens that begin and end a text, null if the model has none."""

    bos_token: str | None
    eos_token: str | None
    vocab_size: int
    max_model_len: int


def tokenize(reader: PromptReader, raw: bytes) -> Tokenized:
    """Answers a body of /tokenize.

    Raises:
        InvalidRequestError, NotFoundError: the request cannot be answered; the message says why.
    """
    body = parse_body(raw, TokenizeBody)
    reader.find_adapter(body.model)
    text, special = _text_of(reader, body)
    tokens = reader.tokenizer.encode(text, add_special_tokens=special, parse_special=body.parse_special is not False)
    if len(tokens) > MAX_SHOWN and (body.with_pieces or body.return_token_strs):
        param = "with_pieces" if body.with_pieces else "return_token_strs"
        raise invalid(
            f"`{param}` shows at most {MAX_SHOWN} tokens, and the text has {len(tokens)}; leave it out, or send parts of it.",
            param,
            "invalid_value",
        )
    names = [_name(reader, token) for token in tokens] if body.return_token_strs else None
    shown = [_piece(reader, token) if body.with_pieces else token for token in tokens]
    return Tokenized(len(tokens), reader.model.max_model_len, shown, names)


def detokenize(reader: PromptReader, raw: bytes) -> Detokenized:
    """Answers a body of /detokenize; errors as in `tokenize`."""
    body = parse_body(raw, DetokenizeBody)
    reader.find_adapter(body.model)
    if not all(token < reader.vocab_size for token in body.tokens):
        raise invalid(f"`tokens` has a token id that is not in [0, {reader.vocab_size}).", "tokens", "token_id_out_of_range")
    most = max(MAX_SHOWN, reader.model.max_model_len)
    if len(body.tokens) > most:
        raise invalid(f"`tokens` may have at most {most} tokens; send parts of them.", "tokens", "invalid_value")
    text = reader.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Detokenized(prompt=text, content=text)


def tokenizer_info(reader: PromptReader) -> TokenizerInfo:
    """Returns the data that a client needs to count tokens itself."""
    tokenizer = reader.tokenizer
    bos, eos = (
        None if token is None else tokenizer.decode([token], skip_special_tokens=False)
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    return TokenizerInfo(bos, eos, reader.vocab_size, reader.model.max_model_len)


def _text_of(reader: PromptReader, body: TokenizeBody) -> tuple[str, bool]:
    """Returns the text of a body, and whether to add special tokens."""
    if sum(part is not None for part in (body.prompt, body.messages, body.content)) != 1:
        raise invalid("Send one of `prompt`, `messages` and `content`.", "prompt", "missing_required_parameter")
    if body.messages is None and body.add_generation_prompt is not None:
        raise invalid("`add_generation_prompt` needs `messages`.", "add_generation_prompt")
    if body.content is not None:
        if body.add_special_tokens is not None:
            raise invalid("With `content` it is called `add_special`.", "add_special_tokens")
        return body.content, bool(body.add_special)
    for name in _LLAMACPP:
        if getattr(body, name) is not None:
            raise invalid(f"`{name}` needs `content`.", name)
    if body.prompt is not None:
        return body.prompt, body.add_special_tokens is not False
    return _render(reader, body), bool(body.add_special_tokens)


def _piece(reader: PromptReader, token: int) -> Piece:
    raw = reader.tokenizer.token_bytes(token)
    try:
        return Piece(token, raw.decode())
    except UnicodeDecodeError:
        return Piece(token, list(raw))


def _render(reader: PromptReader, body: TokenizeBody) -> str:
    if any(message.has_images for message in body.messages or ()):
        raise invalid("`messages` has an image; /v1/messages/count_tokens counts its tokens.", "messages")
    messages: list[dict[str, Any]] = template_messages(body.messages or [])
    return reader.chat_format.template.render(messages, add_generation_prompt=body.add_generation_prompt is not False)


def _name(reader: PromptReader, token: int) -> str:
    """A token as text; bytes that are not a whole character are shown as U+FFFD."""
    return reader.tokenizer.token_bytes(token).decode(errors="replace")


router = RouteTable()


@router.post("/tokenize")
async def create_tokens(request: Request) -> Response:
    """Returns the tokens of a text or a chat, as in the model's input."""
    state = state_of(request)
    return await state.answer_off_the_loop(tokenize, state.reader, await request.body())


@router.post("/detokenize")
async def create_text(request: Request) -> Response:
    """Returns the text of tokens."""
    state = state_of(request)
    return await state.answer_off_the_loop(detokenize, state.reader, await request.body())


@router.get("/tokenizer_info")
async def report_tokenizer(request: Request) -> Response:
    """Returns the tokens that begin and end a text."""
    return json_response(tokenizer_info(state_of(request).reader))
