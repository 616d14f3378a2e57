"""From a checked body to a job: template, tokens, limits. Runs in a worker thread, off the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cloister.privacy.gate import Admission, Gate
from cloister.server.errors import invalid
from cloister.server.job import Echo, Job, make_job
from cloister.server.parse import parse_body
from cloister.server.sampling import check_length, check_number_of_sequences, sampling_params
from cloister.server.schemas import ChatBody, CompletionBody, GenerationBody, Message
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.errors import NotFoundError
from cloister.types.request import ModelInfo

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when the client gives none, as the OpenAI API has it."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads the bodies of one server.

    Attributes:
        model_name: as clients know the model.
        max_n: most sequences of one request.
        request_timeout_s: deadline of a request in the engine.
    """

    gate: Gate
    model: ModelInfo
    model_name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    max_n: int
    request_timeout_s: float

    @property
    def vocab_size(self) -> int:
        """Token ids are below it: both the model and the tokenizer know them."""
        return min(self.model.vocab_size, self.tokenizer.vocab_size)

    def read_chat(self, raw: bytes, admission: Admission) -> Job:
        """Reads a body of /v1/chat/completions.

        Raises:
            InvalidRequestError, ContextLengthError, NotFoundError: it cannot be answered; the message says why.
        PolicyError: the profile refuses what it asks for.
        """
        body = parse_body(raw, ChatBody)
        admission = self._check(body, admission)
        max_tokens = _chat_max_tokens(body)
        sampling = sampling_params(
            body, self.model, max_tokens=max_tokens, vocab_size=self.vocab_size, logprobs=_chat_logprobs(body)
        )
        check_number_of_sequences(sampling.n, 1, self.max_n)
        token_ids = self.tokenizer.encode(self.template.render(template_messages(body.messages)))
        check_length(len(token_ids), sampling, self.model, "messages")
        return make_job([token_ids], sampling, admission, self.model, prefix="chatcmpl", **self._reply_fields(body))

    def read_completion(self, raw: bytes, admission: Admission) -> Job:
        """Reads a body of /v1/completions; errors as in `read_chat`."""
        body = parse_body(raw, CompletionBody)
        admission = self._check(body, admission)
        echo, max_tokens = bool(body.echo), body.max_tokens
        if max_tokens is None:
            max_tokens = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
        answerless = max_tokens == 0
        if answerless and not echo:
            raise invalid("`max_tokens` must be at least 1 unless `echo` is set.", "max_tokens", "invalid_value")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise invalid("`best_of` other than `n` is not available; leave it out.", "best_of", "unsupported_parameter")
        sampling = sampling_params(
            body,
            self.model,
            max_tokens=max(1, max_tokens),  # an engine request makes at least one token; an answerless job drops it
            vocab_size=self.vocab_size,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if echo else None,
        )
        check_number_of_sequences(sampling.n, len(body.prompt), self.max_n)
        prompts = [self._tokenize(prompt) for prompt in body.prompt]
        for prompt in prompts:
            check_length(len(prompt), sampling, self.model, "prompt")
        echoes = tuple(map(self._echo, body.prompt, prompts)) if echo else ()
        return make_job(
            prompts,
            sampling,
            admission,
            self.model,
            prefix="cmpl",
            echoes=echoes,
            answerless=answerless,
            **self._reply_fields(body),
        )

    def _reply_fields(self, body: GenerationBody) -> dict[str, Any]:
        if body.stream_options is not None and not body.stream:
            raise invalid("`stream_options` needs `stream` to be true.", "stream_options")
        return {
            "model_name": self.model_name,
            "timeout_s": self.request_timeout_s,
            "stream": bool(body.stream),
            "include_usage": body.include_usage,
        }

    def _check(self, body: GenerationBody, admission: Admission) -> Admission:
        if body.model != self.model_name:
            raise unknown_model(self.model_name)
        return self.gate.honour(admission, stream=bool(body.stream), priority=body.priority)

    def _tokenize(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        if not all(0 <= token_id < self.vocab_size for token_id in prompt):
            size = self.vocab_size
            raise invalid(f"`prompt` has a token id that is not in [0, {size}).", "prompt", "token_id_out_of_range")
        return prompt

    def _echo(self, prompt: str | list[int], token_ids: list[int]) -> Echo:
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        return Echo(text, self.tokenizer.token_bytes(token_ids[0]))


def unknown_model(served: str) -> NotFoundError:
    """Returns the error for a model name that is not served here."""
    return NotFoundError(f"This server has no such model; it serves `{served}`.", param="model", code="model_not_found")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them.

    Raises:
        InvalidRequestError: a message lacks what its role needs, or has what it must not have.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    if message.text is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(f"`{path}.content` is missing; it is required.", f"{path}.content", "missing_required_parameter")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"`{path}.tool_calls` is only for the role assistant.", f"{path}.tool_calls")
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise invalid(f"`{path}.tool_call_id` is required for the role tool, and only there.", f"{path}.tool_call_id")
    # Templates know the role by its older name.
    rendered: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    rendered["content"] = message.text if message.text is not None else ""
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    return rendered


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
