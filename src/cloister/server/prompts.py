"""From a checked body to a job: template, tokens, limits, fill-in-the-middle; errors use the field names of the client's API.

Runs in a worker thread, off the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from cloister.policy.gate import Admission, Gate
from cloister.server.answers import Echo
from cloister.server.conversation import ChatFormat
from cloister.server.documents import DocumentPrompt, check_weights, read_documents
from cloister.server.errors import invalid
from cloister.server.jobs import GenerationJob, make_job
from cloister.server.messages import REFUSED as MESSAGES_REFUSED
from cloister.server.messages import CountBody, MessagesBody
from cloister.server.messages import to_chat as message_to_chat
from cloister.server.parse import CHAT_REFUSED, parse_body, renamed_fields
from cloister.server.prompt_schemas import find_schema, read_schema_prompt
from cloister.server.responses.keeping import ResponseStore, read_body
from cloister.server.responses.schemas import ResponsesBody
from cloister.server.responses.schemas import to_chat as response_to_chat
from cloister.server.sampling import (
    bound_logprobs,
    check_length,
    check_num_tokens,
    check_number_of_sequences,
    check_text,
    fit_length,
    sampling_params,
)
from cloister.server.schemas import ChatBody, CompletionBody, GenerationBody
from cloister.text import Tokenizer
from cloister.text.infill import Infill
from cloister.types.errors import InvalidRequestError, NotFoundError
from cloister.types.request import AdapterInfo, ModelInfo

NO_TEXT: Final = (
    "This model is an encoder, which generates no text; ask it at /v1/embeddings, /v1/rerank or /classify, or serve another."
)


_POSITIONS: Final = "positions, with those that the schema's other modules and arguments leave free"


def require_infill(tokenizer: Tokenizer, param: str | None = None) -> Infill:
    """Returns how the model fills in the middle.

    Args:
        param: the field that requests it; None if the whole request does.

    Raises:
        InvalidRequestError: the model was not trained to.
    """
    if (infill := Infill.of(tokenizer)) is None:
        what = f"`{param}` is refused: this model" if param else "This model"
        raise invalid(
            f"{what} does not fill in the middle: its vocabulary has no tokens for that. Serve one that was trained to.",
            param,
            "no_infill",
        )
    return infill


def read_suffix(body: CompletionBody, tokenizer: Tokenizer, model: ModelInfo) -> CompletionBody:
    """Returns a body whose prompts include its `suffix`, with the model's fill-in-the-middle tokens.

    Raises:
        InvalidRequestError: the model, or another field, does not support a suffix.
        ContextLengthError: a text is too long by itself.
    """
    if not body.suffix:
        return body
    infill = require_infill(tokenizer, "suffix")
    if body.echo:
        raise invalid("`echo` does not go with `suffix`: the prompt has an end too. Leave one of them out.", "echo")
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) < len(body.prompt):
        raise invalid("`prompt` must be text where `suffix` is set, not token ids.", "prompt", "invalid_type")
    for text, name in (*((text, "prompt") for text in texts), (body.suffix, "suffix")):
        check_text(text, tokenizer, model, name)
    return body.model_copy(
        update={
            "prompt": [infill.encode(text, body.suffix) for text in texts],
            "stop_token_ids": [*(body.stop_token_ids or ()), *infill.stop_token_ids],
        }
    )


RESPONSES: Final[Mapping[str, str]] = {
    r"messages": "input",
    r"max_tokens": "max_output_tokens",
    r"max_completion_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"(tools\[\d+\])\.function\.(\w+)": r"\1.\2",
    r"response_format\.json_schema\.(\w+)": r"text.format.\1",
    r"response_format": "text.format",
}
MESSAGES: Final[Mapping[str, str]] = {
    r"reasoning_effort": "thinking",
    r"stop": "stop_sequences",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function\.(\w+)": r"\1.\2",
    r"response_format\.json_schema\.(\w+)": r"output_config.format.\1",
}
_QUOTED: Final = re.compile(r"`([^`]*)`")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Translates field names in errors to those of the client's API.

    Args:
        names: regular expression for a full field name of /v1/chat/completions -> name in this API.
    """
    try:
        with renamed_fields(lambda path: _rename(path, names)):
            yield
    except InvalidRequestError as error:
        error.message = _QUOTED.sub(lambda quoted: f"`{_rename(quoted[1], names)}`", error.message)
        error.param = None if error.param is None else _rename(error.param, names)
        raise


def _rename(name: str, names: Mapping[str, str]) -> str:
    for pattern, ours in names.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    return name


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads the bodies of one server.

    Attributes:
        model_name: the model's name for clients.
        chat_format: the model's chat format.
        max_n: maximum number of sequences of one request.
        request_timeout_s: deadline of a request in the engine.
        adapters: name -> adapter, for adapters that a request may name as a model.
        other_names: further names of the model.
        responses: stored responses; None if none are stored.
    """

    gate: Gate
    model: ModelInfo
    model_name: str
    tokenizer: Tokenizer
    chat_format: ChatFormat
    max_n: int
    request_timeout_s: float
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)
    other_names: tuple[str, ...] = ()
    responses: ResponseStore | None = None

    @property
    def vocab_size(self) -> int:
        """Token ids are below it: both the model and the tokenizer know them."""
        return min(self.model.vocab_size, self.tokenizer.vocab_size)

    def read_chat(self, raw: bytes, admission: Admission) -> GenerationJob:
        """Reads a body of /v1/chat/completions.

        Raises:
            InvalidRequestError, ContextLengthError, NotFoundError: the request cannot be answered; the message says why.
            PolicyError: the profile refuses a requested feature.
        """
        return self.converse(parse_body(raw, ChatBody, CHAT_REFUSED), admission, prefix="chatcmpl")

    def converse(self, body: ChatBody, admission: Admission, *, prefix: str, fits: bool = False) -> GenerationJob:
        """Prepares a conversation from any route; errors as in `read_chat`.

        Args:
            prefix: prefix of the job's id.
            fits: limit the answer to the rest of the context window instead of refusing the request.
        """
        admission = self._check(body, admission)
        if not body.documents:
            check_weights(body)
        max_tokens = _chat_max_tokens(body)
        sampling = sampling_params(
            body, self.model, max_tokens=max_tokens, vocab_size=self.vocab_size, logprobs=_chat_logprobs(body)
        )
        if body.best_of is not None and not body.use_beam_search and body.best_of != sampling.n:
            raise invalid("`best_of` of a chat is for beam search; set `use_beam_search` too, or leave it out.", "best_of")
        check_number_of_sequences(max(sampling.n, body.best_of or 1), 1, self.max_n)
        opening = self.chat_format.open(body, sampling.grammar, self.model, self._count_links(body.model))
        if fits:
            sampling = fit_length(len(opening.token_ids), sampling, self.model)
        check_length(len(opening.token_ids), sampling, self.model, "messages")
        sampling = bound_logprobs(sampling, [len(opening.token_ids)], self.model, fits=fits)
        sampling = self.model.bound(sampling, len(opening.token_ids))
        sampling = opening.shape(sampling)
        fields = self._reply_fields(body)
        return make_job(
            [opening.token_ids],
            sampling,
            admission,
            self.model,
            prefix=prefix,
            form=opening.form,
            images=opening.images,
            documents=opening.documents,
            **fields,
        )

    def read_response(self, raw: bytes, admission: Admission) -> tuple[GenerationJob, ResponsesBody]:
        """Reads a body of /v1/responses; errors as in `read_chat`."""
        body = read_body(raw, self.responses, admission.owner)
        with renamed(RESPONSES):
            return self.converse(response_to_chat(body), admission, prefix="resp"), body

    def read_message(self, raw: bytes, admission: Admission) -> GenerationJob:
        """Reads a body of /v1/messages; errors as in `read_chat`."""
        body = parse_body(raw, MessagesBody, MESSAGES_REFUSED)
        with renamed(MESSAGES):
            return self.converse(message_to_chat(body), admission, prefix="msg", fits=True)

    def count_message(self, raw: bytes) -> int:
        """Reads a body of /v1/messages/count_tokens and returns its number of prompt tokens; errors as in `read_chat`."""
        body = parse_body(raw, CountBody, MESSAGES_REFUSED)
        self.find_adapter(body.model)
        with renamed(MESSAGES):
            return len(self.chat_format.open(message_to_chat(body)).token_ids)

    def read_completion(self, raw: bytes, admission: Admission) -> GenerationJob:
        """Reads a body of /v1/completions; errors as in `read_chat`."""
        body = read_suffix(parse_body(raw, CompletionBody), self.tokenizer, self.model)
        return self.complete(body, admission, prefix="cmpl")

    def complete(self, body: CompletionBody, admission: Admission, *, prefix: str, fits: bool = False) -> GenerationJob:
        """Prepares raw prompts from any route; arguments as in `converse`."""
        admission = self._check(body, admission)
        echo, max_tokens = bool(body.echo), body.max_tokens
        answerless = max_tokens == 0
        if answerless and not echo:
            raise invalid("`max_tokens` must be at least 1 unless `echo` is set.", "max_tokens", "invalid_value")
        num_kept = _count_kept(body)
        sampling = sampling_params(
            body,
            self.model,
            max_tokens=1 if answerless else max_tokens,  # an engine generates at least one token; an answerless job drops it
            vocab_size=self.vocab_size,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
        )
        if num_kept is not None and body.best_of is not None:
            logprobs = 0 if sampling.logprobs is None else sampling.logprobs
            sampling = msgspec.structs.replace(sampling, n=body.best_of, logprobs=logprobs)
        check_number_of_sequences(max(sampling.n, body.best_of or 1), len(body.prompt), self.max_n)
        pieces = self._read_documents(body, admission)
        prompts = [self._tokenize(prompt) for prompt in body.prompt] if pieces is None else [pieces.token_ids]
        lengths, counted = [len(prompt) for prompt in prompts], "tokens"
        if pieces is not None:
            counted = _POSITIONS if body.prompt_schema is not None else counted
            lengths = [pieces.documents.count_positions(len(pieces.token_ids))]
        if fits:
            sampling = fit_length(max(lengths), sampling, self.model)
        for length in lengths:
            check_length(length, sampling, self.model, "prompt", counted)
        if body.logprobs is not None:
            sampling = bound_logprobs(sampling, lengths, self.model, fits=fits)
        sampling = self.model.bound(sampling, max(lengths))
        echoes = tuple(map(self._echo, body.prompt, prompts)) if echo else ()
        return make_job(
            prompts,
            sampling,
            admission,
            self.model,
            prefix=prefix,
            echoes=echoes,
            answerless=answerless,
            num_kept=num_kept,
            shows_logprobs=body.logprobs is not None,
            documents=None if pieces is None else pieces.documents,
            **self._reply_fields(body),
        )

    def _reply_fields(self, body: GenerationBody) -> dict[str, Any]:
        if body.stream_options is not None and not body.stream:
            raise invalid("`stream_options` needs `stream` to be true.", "stream_options")
        return {
            "model_name": body.model or self.model_name,
            "adapter": self.find_adapter(body.model),
            "timeout_s": self.request_timeout_s,
            "stream": bool(body.stream),
            "include_usage": body.include_usage,
            "continuous_usage": body.continuous_usage,
        }

    def _check(self, body: GenerationBody, admission: Admission) -> Admission:
        self.find_adapter(body.model)
        if self.model.encoder is not None:
            raise invalid(NO_TEXT, "model", "no_generation")
        return self.gate.with_request_options(
            admission,
            stream=bool(body.stream),
            priority=body.priority,
            cache_salt=body.cache_salt,
            prompt_cache_key=body.prompt_cache_key,
            documents=_has_documents(body),
        )

    def find_adapter(self, name: str | None) -> str | None:
        """Returns the digest of the adapter that a request names as its model; None for the model itself.

        Raises:
            NotFoundError: there is no model of that name.
        """
        adapter = self.adapters.get(name) if name is not None else None
        if adapter is None:
            self.check_model(name)
        return None if adapter is None else adapter.digest

    def _count_links(self, name: str | None) -> int:
        """Returns how many link tokens the adapter that a request names has for each document; 0 for the model itself."""
        adapter = self.adapters.get(name) if name is not None else None
        return 0 if adapter is None else adapter.num_links

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for a name that is not served; a request without a name gets the served model."""
        if name is not None and name != self.model_name and name not in self.other_names:
            raise unknown_model(self.model_name)

    def _read_documents(self, body: CompletionBody, admission: Admission) -> DocumentPrompt | None:
        if body.documents is not None:
            return read_documents(body, self.tokenizer, self.model, self._count_links(body.model))
        if body.documents_prefix is not None:
            raise invalid(
                "`documents_prefix` needs `documents`; put the text into `prompt`, or send documents.", "documents_prefix"
            )
        if body.prompt_schema is not None:
            schema = find_schema(self.responses, admission.owner, body.prompt_schema.name)
            return read_schema_prompt(body, schema, self.tokenizer, self.model, self._count_links(body.model))
        check_weights(body)
        return None

    def _tokenize(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            check_text(prompt, self.tokenizer, self.model, "prompt")
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        check_num_tokens(len(prompt), self.model, "prompt")
        if not all(0 <= token_id < self.vocab_size for token_id in prompt):
            size = self.vocab_size
            raise invalid(f"`prompt` has a token id that is not in [0, {size}).", "prompt", "token_id_out_of_range")
        return prompt

    def _echo(self, prompt: str | list[int], token_ids: list[int]) -> Echo:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        return Echo(text, self.tokenizer.token_bytes(token_ids[0]))


def _has_documents(body: GenerationBody) -> bool:
    is_schema = isinstance(body, CompletionBody) and body.prompt_schema is not None
    return is_schema or (isinstance(body, CompletionBody | ChatBody) and bool(body.documents))


def _count_kept(body: CompletionBody) -> int | None:
    """Returns how many of each prompt's sampled answers are returned; None for all."""
    n = body.n or 1
    if body.use_beam_search or body.best_of in (None, n):
        return None
    if body.best_of < n:
        raise invalid("`best_of` must be at least `n`.", "best_of")
    if body.stream:
        raise invalid("Which answers are best is known when they end; leave `stream` or `best_of` out.", "stream")
    return n


def unknown_model(served: str) -> NotFoundError:
    """Returns the error for a model name that is not served here."""
    return NotFoundError(f"This server has no such model; it serves `{served}`.", param="model", code="model_not_found")


def _chat_max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens == 0:
        raise invalid("`max_tokens` must be at least 1.", "max_tokens", "invalid_value")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("`max_tokens` and `max_completion_tokens` differ; send one of them.", "max_completion_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
