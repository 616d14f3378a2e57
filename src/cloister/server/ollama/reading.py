"""Converts a request of Ollama's API to a job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cloister.policy.gate import Admission
from cloister.server.embeddings import PooledBody, Text, pooled_job
from cloister.server.errors import invalid
from cloister.server.jobs import GenerationJob
from cloister.server.ollama.models import served_name
from cloister.server.ollama.schemas import (
    NO_FIELDS,
    REFUSED,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaMessage,
    Options,
)
from cloister.server.parse import check_fields, parse_body
from cloister.server.prompts import PromptReader, renamed
from cloister.server.sampling import check_text
from cloister.server.schemas import INT32, ChatBody, CompletionBody
from cloister.text.infill import Infill
from cloister.types.request import PoolingParams

NAMES: Final[Mapping[str, str]] = {
    r"max_tokens": "options.num_predict",
    r"repetition_penalty": "options.repeat_penalty",
    r"(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)": r"options.\1",
    r"reasoning_effort": "think",
    r"response_format\.json_schema\.\w+": "format",
    r"response_format": "format",
}
"""Names in /v1/chat/completions -> names here, for errors."""
PROMPT_NAMES: Final[Mapping[str, str]] = {**NAMES, r"messages.*": "prompt"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request for an answer.

    Attributes:
        model_name: the model's name for clients.
        job: None if the request only checks that the model is available.
    """

    model_name: str
    job: GenerationJob | None
    stream: bool


def read_chat(reader: PromptReader, raw: bytes, admission: Admission) -> Asked:
    """Reads a body of /api/chat; errors as in `PromptReader.read_chat`."""
    body = parse_body(raw, OllamaChatBody, REFUSED)
    name, stream, logprobs = find_name(reader, body.model), _streams(reader, body.stream), _logprobs(body)
    if not body.messages:
        return Asked(name, None, stream)
    fields = _sampling(body.options) | {"model": name, "stream": stream, "messages": _messages(body.messages)}
    if body.tools:
        fields["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    fields |= logprobs | _form(body) | _effort(body)
    with renamed(NAMES):
        return Asked(name, reader.converse(check_fields(fields, ChatBody), admission, prefix="ollama", fits=True), stream)


def read_generate(reader: PromptReader, raw: bytes, admission: Admission) -> Asked:
    """Reads a body of /api/generate; errors as in `PromptReader.read_chat`."""
    body = parse_body(raw, OllamaGenerateBody, REFUSED)
    name, stream, logprobs = find_name(reader, body.model), _streams(reader, body.stream), _logprobs(body)
    if not body.prompt and not body.suffix:
        return Asked(name, None, stream)
    fields = _sampling(body.options) | {"model": name, "stream": stream} | _form(body)
    with renamed(PROMPT_NAMES):
        if body.suffix or body.raw or not reader.chat_format.template.exists:
            job = _continue(reader, body, fields, admission)
        else:
            said = [("system", body.system), ("user", body.prompt)]
            fields["messages"] = [{"role": role, "content": content} for role, content in said if content]
            fields |= logprobs | _effort(body)
            job = reader.converse(check_fields(fields, ChatBody), admission, prefix="ollama", fits=True)
        return Asked(name, job, stream)


def _continue(reader: PromptReader, body: OllamaGenerateBody, fields: dict[str, Any], admission: Admission) -> GenerationJob:
    """Returns a job that continues a raw text, or fills in the text before a suffix."""
    if body.system and body.raw:
        raise invalid("A `raw` prompt goes to the model unchanged; put `system` into it.", "system")
    if body.suffix:
        infill = Infill.of(reader.tokenizer)
        if infill is None or body.system:
            why = "this model does not fill in the middle" if infill is None else "it goes without `system`"
            raise invalid(f"`suffix` is refused: {why}. Leave it out.", "suffix")
        for text, name in ((body.prompt or "", "prompt"), (body.suffix, "suffix")):
            check_text(text, reader.tokenizer, reader.model, name)
        fields |= {"prompt": infill.encode(body.prompt or "", body.suffix), "stop_token_ids": infill.stop_token_ids}
    else:
        fields["prompt"] = f"{body.system}\n\n{body.prompt}" if body.system else body.prompt
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return reader.complete(check_fields(fields, CompletionBody), admission, prefix="ollama", fits=True)


def read_embed(reader: PromptReader, raw: bytes, admission: Admission) -> tuple[str, GenerationJob | None]:
    """Reads a body of /api/embed; returns the model's name, and no job for no texts. Errors as in `read_embeddings`."""
    body = parse_body(raw, OllamaEmbedBody, NO_FIELDS)
    name, size = find_name(reader, body.model), reader.model.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(f"`dimensions` may be at most {size} with this model.", "dimensions", "invalid_value")
    if not body.input:
        return name, None
    pooling = PoolingParams(kind=reader.model.pooling.kind, normalize=True, dimensions=body.dimensions)
    texts = [("input", text if body.truncate is False else _fitting(reader, text)) for text in body.input]
    return name, pooled_job(reader, check_fields({"model": name}, PooledBody), texts, pooling, admission, prefix="ollama")


def read_embedding(reader: PromptReader, raw: bytes, admission: Admission) -> GenerationJob | None:
    """Reads a body of /api/embeddings, whose vector keeps its length; no job for no text. Errors as in `read_embeddings`."""
    body = parse_body(raw, OllamaEmbeddingsBody, NO_FIELDS)
    name = find_name(reader, body.model)
    if not body.prompt:
        return None
    pooling = PoolingParams(kind=reader.model.pooling.kind, normalize=False)
    texts: list[tuple[str, Text]] = [("prompt", _fitting(reader, body.prompt))]
    return pooled_job(reader, check_fields({"model": name}, PooledBody), texts, pooling, admission, prefix="ollama")


def find_name(reader: PromptReader, name: str | None) -> str:
    """Returns the served name for a client's model name, or the default one.

    Raises:
        NotFoundError: there is no such model.
    """
    found = served_name(name, {reader.model_name, *reader.other_names, *reader.adapters})
    reader.find_adapter(found)
    return found or reader.model_name


def _streams(reader: PromptReader, wish: bool | None) -> bool:
    """Ollama streams by default; if the profile forbids it, an answer is one line."""
    return reader.gate.may_stream if wish is None else wish


def _sampling(options: Options | None) -> dict[str, Any]:
    given = check_fields({}, Options) if options is None else options
    most = given.num_predict
    fields = {
        "max_tokens": most if most is None or most > 0 else INT32 - 1,  # -1 is no limit, -2 the end of the window
        "repetition_penalty": 1.0 if given.repeat_last_n == 0 else given.repeat_penalty,
        "seed": None if given.seed == -1 else given.seed,
    }
    for name in ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty"):
        fields[name] = getattr(given, name)
    return fields


def _form(body: OllamaChatBody | OllamaGenerateBody) -> dict[str, Any]:
    if not body.format:
        return {}
    if isinstance(body.format, str):
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": body.format, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _effort(body: OllamaChatBody | OllamaGenerateBody) -> dict[str, Any]:
    if body.think is None:
        return {}
    return {"reasoning_effort": body.think if isinstance(body.think, str) else "medium" if body.think else "none"}


def _logprobs(body: OllamaChatBody | OllamaGenerateBody) -> dict[str, Any]:
    """Returns the fields of chat completions for log-probabilities."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if body.logprobs else {}


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns messages in the format of chat completions. Calls and results without ids get some, in order."""
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking and message.role == "assistant":
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{len(made)}_{i}", call.function) for i, call in enumerate(message.tool_calls)]
            open_calls = [(call_id, function.name) for call_id, function in calls]
            fields["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": function.name, "arguments": json.dumps(function.arguments, ensure_ascii=False)},
                }
                for call_id, function in calls
            ]
        if message.role == "tool":
            fields["tool_call_id"] = message.tool_call_id or _close_call(open_calls, message.tool_name)
            if message.tool_name:
                fields["name"] = message.tool_name
        made.append(fields)
    return made


def _content(message: OllamaMessage) -> str | list[dict[str, Any]]:
    """Returns a message's text, with its images before it."""
    text = message.content or ""
    if not message.images:
        return text
    # the type of an image is in its own header
    urls = [f"data:image/png;base64,{image}" for image in message.images]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def _close_call(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Returns the id of the call that a result belongs to: the first one of its name that has no result yet."""
    fitting = next((i for i, (_, called) in enumerate(open_calls) if name in (None, called)), None)
    return "call_unknown" if fitting is None else open_calls.pop(fitting)[0]


def _fitting(reader: PromptReader, text: str) -> Text:
    """Returns a text, truncated to the window; a token that ends every text stays at the end."""
    token_ids = reader.tokenizer.encode(text, add_special_tokens=True)
    window, end = reader.model.max_model_len, reader.tokenizer.eos_token_id
    if len(token_ids) <= window:
        return text
    return [*token_ids[: window - 1], end] if token_ids[-1] == end else token_ids[:window]
