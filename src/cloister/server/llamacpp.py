"""llama.cpp's own API (its tools/server/README.md): /completion, /infill, /props and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field, PlainValidator

from cloister.policy.gate import Admission
from cloister.server.answers import LOWEST_LOGPROB, Usage
from cloister.server.calls import HttpCall
from cloister.server.errors import invalid
from cloister.server.jobs import GenerationJob, read_timings
from cloister.server.parse import Refused, check_fields, parse_body
from cloister.server.prompts import PromptReader, renamed, require_infill
from cloister.server.sampling import check_num_tokens, check_text
from cloister.server.schemas import (
    INT32,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_STOP_TOKENS,
    MAX_TOOLS,
    ChatBody,
    CompletionBody,
    Message,
    MinP,
    Penalty,
    PromptText,
    RepetitionPenalty,
    Seed,
    Stop,
    Strict,
    Temperature,
    TemplateSettings,
    TokenId,
    ToolSpec,
    TopK,
    TopP,
)
from cloister.types.request import SamplingParams, SequenceOutput, TokenLogprobs

# Requests of llama.cpp's API as strict models.


MAX_GRAMMAR_CHARS: Final = 8192
"""Size limit of a grammar. Parsing time grows with the square of its rules: this much takes a tenth of a second."""
_SAMPLER: Final = "this sampler is not available"

REFUSED: Final[Mapping[str, Refused]] = {
    "image_data": Refused("models here read and write text only", ([],)),
    "lora": Refused("an adapter is asked for by its name as `model`", ([],)),
    "samplers": Refused("the order of samplers is fixed"),
    "mirostat": Refused(_SAMPLER, (0,)),
    "typical_p": Refused(_SAMPLER, (1, 1.0)),
    "dynatemp_range": Refused(_SAMPLER, (0, 0.0)),
    "dry_multiplier": Refused(_SAMPLER, (0, 0.0)),
    "xtc_probability": Refused(_SAMPLER, (0, 0.0)),
    "top_n_sigma": Refused(_SAMPLER, (-1, -1.0, 0, 0.0)),
    "n_indent": Refused(_SAMPLER, (0,)),
    "min_keep": Refused(_SAMPLER, (0,)),
    "t_max_predict_ms": Refused("the operator limits the time of an answer; bound it with `n_predict`", (0, -1)),
    "n_cmpl": Refused("one request has one answer here; /v1/completions has `n`", (1,)),
    "post_sampling_probs": Refused("log-probabilities are those of the model", (False,)),
    "response_fields": Refused("replies are whole", ([],)),
    "return_progress": Refused("the progress of a prompt is not reported", (False,)),
    "stream_options": Refused("the last event has the counts"),
}


def check_llama_prompt(value: object) -> str | list[int | str]:
    """Returns a prompt: a text, or tokens and texts in any order; a list of one text is that text.

    Raises:
        InvalidRequestError: it is neither, or several prompts.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    if isinstance(value, list) and value and all(type(item) is int or isinstance(item, str) for item in value):
        if any(type(item) is int for item in value):
            return value
        raise invalid("`prompt` has several prompts; send several requests, or use /v1/completions.", "prompt")
    raise invalid("`prompt` must be a string, or a list of token ids and strings.", "prompt", "invalid_type")


LlamaPrompt = Annotated[
    str | list[int | str],
    PlainValidator(
        check_llama_prompt,
        json_schema_input_type=PromptText
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[PromptText], Field(min_length=1, max_length=1)],
    ),
]


class _Sampling(Strict):
    """Sampling parameters. Unset ones are taken from the model's generation_config.json."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = Field(None, ge=-2, lt=INT32)
    max_tokens: int | None = Field(None, ge=-1, lt=INT32)
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_tokens: bool | None = None

    # Fields for llama.cpp's slots and caches: type-checked and ignored.
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    penalize_nl: bool | None = None
    timings_per_token: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_exponent: float | None = None
    xtc_threshold: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=MAX_STOP_TOKENS)] | None = None


class LlamaCompletionBody(_Sampling):
    """Body of /completion."""

    prompt: LlamaPrompt


class ExtraInput(Strict):
    """A file that precedes the text to fill in."""

    text: str
    filename: str | None = None


class LlamaInfillBody(_Sampling):
    """Body of /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraInput], Field(max_length=MAX_MESSAGES)] | None = None
    prompt: str | None = None


class ApplyTemplateBody(Strict):
    """Body of /apply-template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateSettings | None = None


# Converts a body of llama.cpp's API to a job.


NAMES: Final[Mapping[str, str]] = {
    r"max_tokens": "n_predict",
    r"repetition_penalty": "repeat_penalty",
    r"logprobs": "n_probs",
    r"guided_json": "json_schema",
}
"""Names in /v1/completions -> names here, for errors."""


@dataclass(frozen=True, slots=True)
class LlamaJob:
    """A parsed request.

    Attributes:
        prompt: the prompt in the reply.
        returns_tokens: the reply has the ids of its tokens.
        shows_probs: the reply has log-probabilities.
    """

    job: GenerationJob
    prompt: str
    returns_tokens: bool
    shows_probs: bool


def read_completion(reader: PromptReader, raw: bytes, admission: Admission) -> LlamaJob:
    """Reads a body of /completion; errors as in `PromptReader.read_chat`."""
    body = parse_body(raw, LlamaCompletionBody, REFUSED)
    if isinstance(body.prompt, str):
        return _ask(reader, body, body.prompt, [], body.prompt, admission)
    check_num_tokens(len(body.prompt), reader.model, "prompt", "entries for ")
    token_ids: list[int] = []
    for item in body.prompt:
        if isinstance(item, str):
            check_text(item, reader.tokenizer, reader.model, "prompt")
        begins = not token_ids and isinstance(item, str)
        token_ids += reader.tokenizer.encode(item, add_special_tokens=begins) if isinstance(item, str) else [item]
    return _ask(reader, body, token_ids, [], "", admission)


def read_infill(reader: PromptReader, raw: bytes, admission: Admission) -> LlamaJob:
    """Reads a body of /infill; errors as in `PromptReader.read_chat`."""
    body = parse_body(raw, LlamaInfillBody, REFUSED)
    infill = require_infill(reader.tokenizer)
    extra = "".join(f"{each.text}\n" for each in body.input_extra or ())
    before = f"{extra}{body.input_prefix}{body.prompt or ''}"
    for text, name in ((before, "input_prefix"), (body.input_suffix, "input_suffix")):
        check_text(text, reader.tokenizer, reader.model, name)
    token_ids = infill.encode(before, body.input_suffix)
    return _ask(reader, body, token_ids, infill.stop_token_ids, "", admission)


def apply_template(reader: PromptReader, raw: bytes) -> str:
    """Reads a body of /apply-template and returns the text that the model would read.

    Raises:
        InvalidRequestError: the model does not support it; the message says why.
    """
    body = parse_body(raw, ApplyTemplateBody, {})
    reader.find_adapter(body.model)
    chat = check_fields(body.model_dump(exclude_none=True), ChatBody)
    return reader.tokenizer.decode(reader.chat_format.open(chat).token_ids, skip_special_tokens=False)


def _ask(
    reader: PromptReader,
    body: LlamaCompletionBody | LlamaInfillBody,
    prompt: str | list[int],
    stops: list[int],
    shown: str,
    admission: Admission,
) -> LlamaJob:
    most = body.max_tokens if body.n_predict is None else body.n_predict
    if most == 0:
        raise invalid("`n_predict` must be at least 1, or -1 for as many as fit.", "n_predict", "invalid_value")
    fields: dict[str, Any] = {
        "model": body.model,
        "prompt": prompt,
        "stream": body.stream,
        "max_tokens": INT32 - 1 if most is not None and most < 0 else most,
        "repetition_penalty": 1.0 if body.repeat_last_n == 0 else body.repeat_penalty,
        "seed": None if body.seed == -1 else body.seed,
        "logit_bias": _biases(body.logit_bias),
        "logprobs": body.n_probs or None,
        "stop_token_ids": stops,
        "guided_json": body.json_schema,
        "guided_grammar": None if not body.grammar else _to_lark(body.grammar),
    }
    for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop", "ignore_eos"):
        fields[name] = getattr(body, name)
    with renamed({**NAMES, r"guided_grammar": "grammar"}):
        job = reader.complete(check_fields(fields, CompletionBody), admission, prefix="llama", fits=True)
    return LlamaJob(job, shown, bool(body.return_tokens), bool(body.n_probs))


def _biases(given: object) -> dict[str, float] | None:
    """Returns biases of either form: an object, or a list of [token id, bias]; false is a bias that forbids the token."""
    if given in (None, [], {}):
        return None
    if isinstance(given, dict | list) and len(given) > MAX_LOGIT_BIAS:
        raise invalid(f"`logit_bias` must be a list of {MAX_LOGIT_BIAS} or fewer.", "logit_bias", "invalid_value")
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise invalid("`logit_bias` must be a list of [token id, bias], or an object of them.", "logit_bias", "invalid_type")
    return {str(token): -100.0 if bias is False else float(bias) for token, bias in pairs}


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    token, bias = pair
    return (type(token) is int or isinstance(token, str)) and (bias is False or type(bias) in (int, float))


def _to_lark(grammar: str) -> str:
    """Returns a grammar in llama.cpp's notation (GBNF) in that of this server."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar)).removeprefix("%llguidance {}")
    except Exception:  # the library's message may repeat the grammar
        raise invalid("`grammar` is not a grammar in GBNF; check it against llama.cpp's documentation.", "grammar") from None


# Writes engine outputs as replies of /completion and /infill.


class CompletionWriter:
    """Writes one reply, whole or in events."""

    def __init__(self, asked: LlamaJob, call: HttpCall | None) -> None:
        self._asked = asked
        self._call = call
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._probs: list[msgspec.Raw] = []
        self._stop_reason: str | int | None = None
        self._finish_reason = ""

    def add(self, output: SequenceOutput) -> dict[str, Any] | None:
        """Adds the delta of one step; returns its event, if there is one."""
        entries = (output.logprobs or ()) if self._asked.shows_probs else ()
        probs = [msgspec.Raw(msgspec.json.encode(_position(entry))) for entry in entries]
        self._texts.append(output.text)
        self._tokens += output.token_ids
        self._probs += probs
        if output.finish_reason is not None:
            self._finish_reason, self._stop_reason = output.finish_reason.value, output.stop_reason
        if not output.text and not probs:
            return None
        event: dict[str, Any] = {"index": 0, "content": output.text, "tokens": list(output.token_ids), "stop": False}
        return event | ({"completion_probabilities": probs} if probs else {})

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Returns the whole reply."""
        reply = {**self.last(usage), "content": "".join(self._texts)}
        if self._asked.returns_tokens:
            reply["tokens"] = self._tokens
        return reply | ({"completion_probabilities": self._probs} if self._probs else {})

    def last(self, usage: Usage) -> dict[str, Any]:
        """Returns the last event of a stream."""
        job, sampling = self._asked.job, self._asked.job.requests[0].sampling
        word = self._stop_reason if isinstance(self._stop_reason, str) else ""
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "stop": True,
            "model": job.model_name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.prompt_tokens_details.cached_tokens,
            "generation_settings": describe_sampling(sampling),
            "prompt": self._asked.prompt,
            "has_new_line": any("\n" in text for text in self._texts),
            "truncated": False,
            "stop_type": "limit" if self._finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "timings": dict(self._timings(usage)),
        }

    def _timings(self, usage: Usage) -> Iterator[tuple[str, float]]:
        times = read_timings(self._call, self._asked.job)
        num_computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        for name, count, time_s in (
            ("prompt", num_computed, times.prompt_s),
            ("predicted", usage.completion_tokens, times.answer_s),
        ):
            yield f"{name}_n", count
            if time_s is not None:
                yield f"{name}_ms", 1000 * time_s
                yield f"{name}_per_token_ms", 1000 * time_s / max(1, count)
                yield f"{name}_per_second", count / time_s if time_s > 0 else 0.0


def describe_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the sampling parameters in llama.cpp's format."""
    return {
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
    }


def _position(entry: TokenLogprobs) -> dict[str, Any]:
    top = [_token(token_id, text, logprob) for (token_id, logprob), text in zip(entry.top, entry.top_texts, strict=True)]
    return {**_token(entry.token_id, entry.text, entry.logprob), "top_logprobs": top}


def _token(token_id: int, text: bytes, logprob: float) -> dict[str, Any]:
    finite = max(LOWEST_LOGPROB, logprob)
    return {"id": token_id, "token": text.decode(errors="replace"), "bytes": list(text), "logprob": finite}
