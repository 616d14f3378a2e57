"""What may be asked: one prompt or many, as text or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from cloister.text import grammar as grammars
from cloister.types.errors import InvalidRequestError
from cloister.types.request import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text and a flat list of token ids are one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def one_for_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams, num_prompts: int
) -> list[SamplingParams]:
    """Returns sampling parameters for each prompt.

    Raises:
        InvalidRequestError: there are more or fewer of them than prompts.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or default] * num_prompts
    each = list(sampling)
    if len(each) != num_prompts:
        raise InvalidRequestError(f"there are {num_prompts} prompts and {len(each)} sampling parameters; give one for each")
    return each


def check_grammars(sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Returns sampling parameters with their grammars checked, each different one once.

    Raises:
        InvalidRequestError: a grammar cannot be followed; the message says why.
    """
    asked = {params.grammar for params in sampling if params.grammar is not None}
    checked = {grammar: grammars.check_grammar(grammar, "grammar") for grammar in asked}
    return [
        params if params.grammar is None else msgspec.structs.replace(params, grammar=checked[params.grammar])
        for params in sampling
    ]
