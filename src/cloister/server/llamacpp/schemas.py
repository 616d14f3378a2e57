"""Requests of llama.cpp's API as strict models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator

from cloister.server.errors import invalid
from cloister.server.fields import Refused
from cloister.server.schemas import (
    INT32,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
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

MAX_GRAMMAR_CHARS: Final = 8192
"""Reading a grammar takes a time that grows with the square of its rules: this much takes a tenth of a second."""
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
    "t_max_predict_ms": Refused("the time of an answer is the operator's affair; bound it with `n_predict`", (0, -1)),
    "n_cmpl": Refused("one request has one answer here; /v1/completions has `n`", (1,)),
    "post_sampling_probs": Refused("log-probabilities are those of the model", (False,)),
    "response_fields": Refused("replies are whole", ([],)),
    "return_progress": Refused("progress of a prompt is not told", (False,)),
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
    """How to sample. What a client leaves open is taken from the model's own generation_config.json."""

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

    # What belongs to llama.cpp's slots and caches: checked for their type and forgotten.
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
    dry_sequence_breakers: list[str] | None = None


class LlamaCompletionBody(_Sampling):
    """Body of /completion."""

    prompt: LlamaPrompt


class ExtraInput(Strict):
    """A file that stands before what is to be filled in."""

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
