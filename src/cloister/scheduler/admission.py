"""Rejects requests that can never run, immediately and with a figure that would fit. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from cloister.types.documents import MAX_LINKS
from cloister.types.request import Request, SamplingParams

MAX_LENGTH_PENALTY: Final = 10.0
MAX_CANDIDATES: Final = 32768
"""Limit on candidate tokens in one step of a beam search, over all beams: sorting more would delay all requests."""
MIN_DOCUMENT_WEIGHT: Final = 0.1
MAX_DOCUMENT_WEIGHT: Final = 10.0
"""Limits of the temperature and the scale of documents."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine.

    Attributes:
        max_model_len: prompt and output of one sequence, in tokens.
        max_num_seqs: sequences that run at once.
        num_kv_tokens: KV positions of the whole pool.
        block_size: positions in one KV block.
        max_step_tokens: tokens of one step.
        takes_documents: it can encode documents separately: every layer sees all positions.
        weighs_documents: its program can weigh them by a temperature and a scale.
        places_documents: tokens may turn by other positions than they stand at (`Documents.positions`).
    """

    max_model_len: int
    max_num_seqs: int
    num_kv_tokens: int
    block_size: int = 1
    max_step_tokens: int = 2**31
    takes_documents: bool = True
    weighs_documents: bool = True
    places_documents: bool = True


def count_beam_slots(max_num_seqs: int) -> int:
    """Returns how many sequences all beam searches together may hold; other requests always find the rest."""
    return max_num_seqs // 2


def find_refusal(request: Request, limits: EngineLimits) -> str | None:
    """Returns why a request can never run on an engine, or None if it can."""
    return (
        find_wrong_sampling(request.sampling)
        or find_wrong_beams(request.sampling)
        or _find_wrong_pooling(request)
        or _find_wide_image(request, limits)
        or _find_wrong_documents(request, limits)
        or _find_misfit(request, limits)
    )


def find_wrong_sampling(sampling: SamplingParams) -> str | None:
    """Returns an error for the first invalid sampling parameter, with its valid values."""
    for name, holds, values in (
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k >= 0, "0 or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty >= 0.01, "0.01 or more"),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), "a finite number"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), "a finite number"),
        ("min_tokens", sampling.min_tokens >= 0, "0 or more"),
        ("max_tokens", sampling.max_tokens is None or sampling.max_tokens >= 0, "0 or more"),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0, "0 or more"),
        ("prompt_logprobs", sampling.prompt_logprobs is None or sampling.prompt_logprobs >= 0, "0 or more"),
    ):
        if not holds:
            return f"{name} must be {values}"
    return None


def find_wrong_beams(sampling: SamplingParams) -> str | None:
    """Returns an error for the first sampling parameter that beam search does not support."""
    beams = sampling.beams
    if beams is None:
        return None
    if not 1 <= sampling.n <= beams.width:
        return f"n must be from 1 to {beams.width}, the beams of the search"
    if not abs(beams.length_penalty) <= MAX_LENGTH_PENALTY:
        return f"length_penalty must be from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
    for name, is_given in (
        ("stop", bool(sampling.stop)),
        ("min_tokens", sampling.min_tokens > 0),
        ("logprobs", sampling.logprobs is not None or sampling.prompt_logprobs is not None),
        ("penalties", (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)),
        ("logit_bias", bool(sampling.logit_bias)),
        ("a grammar", sampling.grammar is not None),
        ("max_tokens 0", sampling.max_tokens == 0),
    ):
        if is_given:
            return f"beam search does not support {name}; leave out one of the two"
    return None


def _find_wrong_pooling(request: Request) -> str | None:
    pooling, sampling = request.pooling, request.sampling
    if pooling is None:
        return None
    if sampling.max_tokens != 0 or sampling.n != 1 or sampling.prompt_logprobs is not None:
        return "a prompt that is pooled has no answer; set max_tokens to 0 and n to 1, and ask for no prompt_logprobs"
    if pooling.dimensions is not None and pooling.dimensions < 1:
        return "dimensions must be 1 or more"
    return None


def _find_wide_image(request: Request, limits: EngineLimits) -> str | None:
    """An image whose positions see each other is computed in one step, beside a token of each sequence that runs."""
    widest = max((image.num_tokens for image in request.images if image.bidirectional), default=0)
    num_needed = widest + limits.max_num_seqs - 1
    if not widest or num_needed <= limits.max_step_tokens:
        return None
    return (
        f"an image of this model takes {widest} tokens of one step, which has {limits.max_step_tokens} for up to "
        f"{limits.max_num_seqs} sequences; the operator can set --max-batched-tokens to {num_needed} or more"
    )


def _find_wrong_documents(request: Request, limits: EngineLimits) -> str | None:
    documents = request.documents
    if documents is None:
        return None
    if not limits.takes_documents:
        return "some layers of this model do not see all positions; put the documents into the prompt"
    if request.images or request.pooling is not None or request.sampling.prompt_logprobs is not None:
        return "documents do not go with images, pooling or prompt_logprobs; leave out one of the two"
    if not all(MIN_DOCUMENT_WEIGHT <= weight <= MAX_DOCUMENT_WEIGHT for weight in (documents.temperature, documents.scale)):
        return f"temperature and scale of documents must be from {MIN_DOCUMENT_WEIGHT:g} to {MAX_DOCUMENT_WEIGHT:g}"
    if documents.has_weights and not limits.weighs_documents:
        return "this back end cannot weigh documents; leave out their temperature and scale"
    if documents.positions:
        firsts, turned = zip(*documents.positions, strict=True)
        is_placed = firsts[0] == turned[0] == 0 and (*firsts[1:], documents.starts[0])[0] >= documents.starts[0]
        if not limits.places_documents:
            return "this model cannot place modules of a schema; send the text as a prompt"
        if not is_placed or list(firsts) != sorted(set(firsts)) or firsts[-1] >= len(request.token_ids) or min(turned) < 0:
            return "positions of documents need runs in order, the first of which is the prefix at position 0"
        if documents.count_positions(len(request.token_ids)) >= limits.max_model_len:
            return f"the modules of the schema have positions beyond the context window, which holds {limits.max_model_len}"
    bounds = (0, *documents.starts, documents.end)
    is_sorted = all(before < after for before, after in pairwise(bounds))
    if not documents.starts or not is_sorted or any(bound % limits.block_size for bound in bounds):
        return f"documents need bounds that ascend from above 0 in multiples of {limits.block_size}"
    if not 0 <= documents.num_links <= MAX_LINKS or (documents.num_links and request.adapter is None):
        return f"documents have up to {MAX_LINKS} link tokens each, and only with an adapter; ask for one that has them"
    if documents.links_end >= len(request.token_ids):
        return "nothing follows the documents; send at least one token behind them"
    return None


def _find_misfit(request: Request, limits: EngineLimits) -> str | None:
    num_prompt = len(request.token_ids)
    num_output = request.sampling.max_tokens
    if num_prompt < 1:
        return "the prompt is empty; send at least one token"
    if num_prompt + int(num_output != 0) > limits.max_model_len:
        return (
            f"the prompt has {num_prompt} tokens and the context window holds {limits.max_model_len}, answer included; "
            "shorten the prompt"
        )
    if request.sampling.n > limits.max_num_seqs:
        return f"n is {request.sampling.n} and at most {limits.max_num_seqs} sequences run at once; lower n"
    width = 1 if request.sampling.beams is None else request.sampling.beams.width
    num_beam_slots = count_beam_slots(limits.max_num_seqs)
    if request.sampling.beams is not None and width > num_beam_slots:
        remedy = "take fewer" if num_beam_slots else "leave out use_beam_search"
        return (
            f"the search has {width} beams, and beam searches may hold {num_beam_slots} of the {limits.max_num_seqs} "
            f"sequences that run at once, half of them; {remedy}, or have the operator raise --max-num-seqs"
        )
    num_most = limits.max_model_len if num_output is None else min(limits.max_model_len, num_prompt + num_output)
    num_positions = count_positions(num_prompt, num_most - num_prompt)
    if request.sampling.beams is not None:  # worst case: beams share nothing, and each needs one more block during a copy
        num_positions = width * (-(-num_positions // limits.block_size) + 1) * limits.block_size
        if num_positions > limits.num_kv_tokens:
            return (
                f"{width} beams may need {num_positions} tokens of KV and the server holds {limits.num_kv_tokens}; "
                "lower max_tokens, take fewer beams, or shorten the prompt"
            )
    if num_positions > limits.num_kv_tokens:
        num_fitting = limits.num_kv_tokens - num_prompt + 1
        remedy = f"set max_tokens to {num_fitting} or less, or " if num_fitting > 0 else ""
        return (
            f"prompt and answer may need {num_positions} tokens of KV and the server holds {limits.num_kv_tokens}; "
            f"{remedy}shorten the prompt"
        )
    return None


def count_positions(num_prompt: int, num_output: int) -> int:
    """Returns the KV positions of a whole answer; its last token is never an input, so it needs none."""
    return num_prompt + max(0, num_output - 1)
