"""From a body of llama.cpp's API to the job that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cloister.privacy.gate import Admission
from cloister.server.errors import invalid
from cloister.server.infill import require_infill
from cloister.server.job import GenerationJob
from cloister.server.llamacpp.schemas import (
    REFUSED,
    ApplyTemplateBody,
    LlamaCompletionBody,
    LlamaInfillBody,
)
from cloister.server.parse import check_fields, parse_body
from cloister.server.prompts import PromptReader
from cloister.server.renaming import renamed
from cloister.server.schemas import INT32, ChatBody, CompletionBody

NAMES: Final[Mapping[str, str]] = {
    r"max_tokens": "n_predict",
    r"repetition_penalty": "repeat_penalty",
    r"logprobs": "n_probs",
    r"guided_json": "json_schema",
}
"""Names in /v1/completions -> names here, for errors."""


@dataclass(frozen=True, slots=True)
class LlamaJob:
    """What one call asks for.

    Attributes:
        prompt: as the reply repeats it.
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
    token_ids: list[int] = []
    for item in body.prompt:
        begins = not token_ids and isinstance(item, str)
        token_ids += reader.tokenizer.encode(item, add_special_tokens=begins) if isinstance(item, str) else [item]
    return _ask(reader, body, token_ids, [], "", admission)


def read_infill(reader: PromptReader, raw: bytes, admission: Admission) -> LlamaJob:
    """Reads a body of /infill; errors as in `PromptReader.read_chat`."""
    body = parse_body(raw, LlamaInfillBody, REFUSED)
    infill = require_infill(reader.tokenizer)
    extra = "".join(f"{each.text}\n" for each in body.input_extra or ())
    token_ids = infill.encode(f"{extra}{body.input_prefix}{body.prompt or ''}", body.input_suffix)
    return _ask(reader, body, token_ids, infill.stop_token_ids, "", admission)


def apply_template(reader: PromptReader, raw: bytes) -> str:
    """Reads a body of /apply-template and returns the text that the model would read.

    Raises:
        InvalidRequestError: the model cannot take it; the message says why.
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
    except Exception:  # what the library says may repeat the grammar
        raise invalid("`grammar` is no grammar in GBNF; check it against llama.cpp's documentation.", "grammar") from None
