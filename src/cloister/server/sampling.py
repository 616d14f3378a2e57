"""Converts a request's fields and the model's defaults to `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from cloister.scheduler.admission import find_wrong_beams
from cloister.server.errors import invalid
from cloister.server.schemas import GenerationBody
from cloister.text import Tokenizer
from cloister.text import grammar as grammars
from cloister.types.errors import ContextLengthError
from cloister.types.request import BeamSearch, Grammar, GrammarKind, ModelInfo, SamplingParams

MAX_REPLY_LOGPROBS: Final = 2**18
"""Log-probabilities in one reply, over all of its answers: each token has its own and those of the most likely ones. As JSON
they take 18 MB."""

# Structured output: OpenAI's `response_format`, and the equivalent fields of vLLM and llama.cpp.


def read_grammar(body: GenerationBody) -> Grammar | None:
    """Returns the checked grammar of an answer, or None for free text. May take a few hundred milliseconds.

    Raises:
        InvalidRequestError: it is not supported, or two fields define one; names the field.
    """
    wishes = list(_wishes(body))
    if not wishes:
        return None
    if len(wishes) > 1:
        fields = " and ".join(f"`{param}`" for param, _ in wishes)
        raise invalid(f"{fields} ask for different forms of one answer; send one of them.", wishes[1][0], "invalid_value")
    param, grammar = wishes[0]
    return grammars.check_grammar(grammar, param)


def _wishes(body: GenerationBody) -> Iterator[tuple[str, Grammar]]:
    """Yields every requested form, with its field."""
    yield from _response_format(body)
    guided = (body.guided_json, None, body.guided_regex, body.guided_choice, body.guided_grammar)
    yield from _extras("guided_", *guided)
    if (outputs := body.structured_outputs) is not None:
        extras = (outputs.json_, outputs.json_object, outputs.regex, outputs.choice, outputs.grammar)
        yield from _extras("structured_outputs.", *extras)
    if body.grammar is not None:
        yield "grammar", Grammar(GrammarKind.LARK, body.grammar)


def _response_format(body: GenerationBody) -> Iterator[tuple[str, Grammar]]:
    form = body.response_format
    if form is None:
        return
    if (form.json_schema is not None) != (form.type == "json_schema"):
        raise invalid(
            "`response_format.json_schema` is required for the type json_schema, and only there.",
            "response_format.json_schema",
            "invalid_value",
        )
    if form.type == "json_object" or (form.json_schema is not None and form.json_schema.schema_ is None):
        yield "response_format", Grammar(GrammarKind.JSON_OBJECT)
    elif form.json_schema is not None:
        param = "response_format.json_schema.schema"
        yield param, _of_schema(form.json_schema.schema_, param)


def _extras(
    prefix: str, schema: Any, is_object: bool | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[tuple[str, Grammar]]:
    if schema is not None:
        yield f"{prefix}json", _of_schema(schema, f"{prefix}json")
    if is_object:
        yield f"{prefix}json_object", Grammar(GrammarKind.JSON_OBJECT)
    if regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        yield f"{prefix}choice", Grammar(GrammarKind.CHOICE, json.dumps(choice))
    if grammar is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.LARK, grammar)


def _of_schema(schema: Any, param: str) -> Grammar:
    if isinstance(schema, str):
        return Grammar(GrammarKind.JSON_SCHEMA, schema)
    grammars.check_schema_size(schema, param)  # the interpreter lock is held while it is written
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


T = TypeVar("T")


def sampling_params(
    body: GenerationBody,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    vocab_size: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Returns the sampling parameters: the client's, else those of generation_config.json, else the OpenAI defaults.

    Args:
        max_tokens: maximum output tokens, None for as many as fit.
        vocab_size: token ids are below it.

    Raises:
        InvalidRequestError: fields contradict each other, or name a token that the model does not have.
    """
    defaults = model.defaults
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise invalid("`min_tokens` is more than the answer may have; lower it or raise `max_tokens`.", "min_tokens")
    beams = _read_beams(body)
    if beams is not None:
        defaults = {"temperature": 0.0}  # the model's defaults concern sampling
    sampling = SamplingParams(
        n=body.n or 1,
        temperature=float(_first(body.temperature, defaults.get("temperature"), 1.0)),
        top_p=float(_first(body.top_p, defaults.get("top_p"), 1.0)),
        top_k=max(0, int(_first(body.top_k, defaults.get("top_k"), 0))),
        min_p=float(_first(body.min_p, defaults.get("min_p"), 0.0)),
        repetition_penalty=float(_first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_token_biases(body.logit_bias or {}, vocab_size),
        seed=body.seed,
        stop=tuple(body.stop or ()),
        stop_token_ids=_known_tokens(body.stop_token_ids or [], vocab_size, "stop_token_ids"),
        min_tokens=body.min_tokens or 0,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=read_grammar(body),
        beams=beams,
    )
    if (refusal := find_wrong_beams(sampling)) is not None:  # the engine would refuse it as a request that does not fit
        raise invalid(f"{refusal[0].upper()}{refusal[1:]}.", "use_beam_search")
    return sampling


def _read_beams(body: GenerationBody) -> BeamSearch | None:
    if not body.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(body, name) not in (None, False, 1.0):
                raise invalid(f"`{name}` is for beam search; set `use_beam_search` too, or leave it out.", name)
        return None
    if body.stream:
        raise invalid("Beam search knows its answers when it ends; leave `stream` out.", "stream")
    if body.temperature:
        raise invalid("Beam search draws nothing; leave `temperature` out, or set it to 0.", "temperature")
    width = body.best_of or body.n or 1
    if width < (body.n or 1):
        raise invalid("`best_of` must be at least `n`.", "best_of")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamSearch(width=width, length_penalty=penalty, early_stopping=bool(body.early_stopping))


def check_number_of_sequences(n: int, num_prompts: int, max_n: int) -> None:
    """Raises InvalidRequestError if a request needs more sequences of a prompt than `max_n`."""
    if n > max_n:
        raise invalid(f"`n` may be at most {max_n} on this server; send several requests.", "n", "invalid_value")
    if num_prompts > 1 and n * num_prompts > max(max_n, num_prompts):
        raise invalid(
            f"{num_prompts} prompts with `n` = {n} are {n * num_prompts} answers; one request may ask for {max_n}.", "n"
        )


def check_length(
    num_prompt_tokens: int, sampling: SamplingParams, model: ModelInfo, param: str, counted: str = "tokens"
) -> None:
    """Checks that a prompt is not empty and leaves space for the answer.

    Args:
        counted: what `num_prompt_tokens` counts, for the message.

    Raises:
        InvalidRequestError: the prompt has no token.
        ContextLengthError: it is too long; the message has the figures.
    """
    if num_prompt_tokens == 0:
        raise invalid(f"`{param}` is empty; send at least one token.", param, "empty_prompt")
    room = model.max_model_len - num_prompt_tokens
    asked = max(sampling.max_tokens or 1, sampling.min_tokens)
    if asked <= room or (sampling.ends_with_prompt and num_prompt_tokens <= model.longest_prompt):
        return
    window = _describe_window(f"{num_prompt_tokens} {counted}", model)
    if room < 1:
        raise ContextLengthError(f"{window}. Shorten it to at most {model.max_model_len - 1}.", param=param)
    raise ContextLengthError(
        f"{window} and the answer asks for {asked}. Ask for at most {room}, or shorten the prompt.", param="max_tokens"
    )


def check_text(text: str, tokenizer: Tokenizer, model: ModelInfo, param: str) -> None:
    """Refuses a text, before it is tokenized, that no prompt of the model has a place for.

    Raises:
        ContextLengthError: it is too long; the message has the figures.
    """
    check_num_tokens(tokenizer.least_tokens(text), model, param, "at least ")


def check_num_tokens(num_tokens: int, model: ModelInfo, param: str, counts: str = "") -> None:
    """Refuses a prompt by its length alone, before its tokens are looked at.

    Args:
        counts: stands before the number in the message, where it is not exact.

    Raises:
        ContextLengthError: no prompt of the model has a place for it; the message has the figures.
    """
    if num_tokens > model.longest_prompt:
        window = _describe_window(f"{counts}{num_tokens} tokens", model)
        raise ContextLengthError(f"{window}. Shorten it to at most {model.max_model_len - 1}.", param=param)


def _describe_window(length: str, model: ModelInfo) -> str:
    window = f"The context window holds {model.max_model_len} tokens; the prompt has {length}"
    if model.longest_prompt > model.max_model_len:
        window += f" (up to {model.longest_prompt} where the answer has one token at most, without documents and images)"
    return window


def bound_logprobs(sampling: SamplingParams, lengths: Sequence[int], model: ModelInfo, *, fits: bool = False) -> SamplingParams:
    """Bounds what a reply has of log-probabilities, by which the front's memory grows: an answer of unset length gets shorter.

    Args:
        lengths: tokens of each prompt.
        fits: an answer whose length is set gets shorter too.

    Raises:
        InvalidRequestError: the request asks for too many.
    """
    if sampling.logprobs is None:
        return sampling
    num_each = 1 + max(sampling.logprobs, sampling.prompt_logprobs or 0)
    num_echoed = sampling.n * sum(lengths) if sampling.prompt_logprobs is not None else 0
    most = (MAX_REPLY_LOGPROBS // num_each - num_echoed) // (sampling.n * len(lengths))
    wanted = sampling.max_tokens
    if wanted is None:
        room = model.max_model_len - min(lengths)
        wanted = room if model.default_max_tokens is None else min(room, max(model.default_max_tokens, sampling.min_tokens))
    if wanted <= most:
        return sampling
    if most >= max(1, sampling.min_tokens) and (fits or sampling.max_tokens is None):
        return msgspec.structs.replace(sampling, max_tokens=most)
    num_tokens = sampling.n * len(lengths) * wanted + num_echoed
    remedy = f"set `max_tokens` to {most} or less, or ask for fewer answers or top tokens" if most > 0 else "ask for less"
    raise invalid(
        f"The reply may have {num_tokens} tokens with {num_each} log-probabilities each, and has room for {MAX_REPLY_LOGPROBS} "
        f"log-probabilities; {remedy}.",
        "logprobs",
        "invalid_value",
    )


def fit_length(num_prompt_tokens: int, sampling: SamplingParams, model: ModelInfo) -> SamplingParams:
    """Limits the output tokens to the rest of the context window, if at least one fits."""
    room = max(1, model.max_model_len - num_prompt_tokens)
    if sampling.max_tokens is None or sampling.max_tokens <= room:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _token_biases(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    # isdecimal alone accepts digits of other scripts and int() accepts "1_0" and " 1": keep to ASCII digits.
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in biases):
        raise invalid("`logit_bias` must map token ids, as strings of digits, to numbers.", "logit_bias")
    _known_tokens([int(key) for key in biases], vocab_size, "logit_bias")
    return {int(key): value for key, value in biases.items()}


def _known_tokens(ids: list[int], vocab_size: int, param: str) -> tuple[int, ...]:
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise invalid(f"`{param}` has a token id that is not in [0, {vocab_size}).", param, "token_id_out_of_range")
    return tuple(ids)
