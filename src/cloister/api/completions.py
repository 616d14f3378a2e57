"""The results of a prompt: answers, progress while they are generated, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from cloister.text import grammar as grammars
from cloister.types.errors import EngineError, InvalidRequestError
from cloister.types.request import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs


def check_end(output: SequenceOutput) -> None:
    """Raises the CloisterError of a sequence that ended without an answer; the message says why."""
    if output.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
        is_invalid = output.finish_reason in (FinishReason.REJECTED, FinishReason.UNSUPPORTED)
        kind = InvalidRequestError if is_invalid else EngineError
        raise kind(output.error or f"the request ended early: {output.finish_reason}")


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's n answers.

    Attributes:
        finish_reason: "stop" or "length"; anything else raises instead.
        stop_reason: the stop string or token id that ended it, None for EOS and length.
        logprobs: one entry a token, if they were asked for.
    """

    index: int
    text: str = field(default="", repr=False)
    token_ids: list[int] = field(default_factory=list, repr=False)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = field(default=None, repr=False)
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class Completion:
    """The answers to one prompt.

    Attributes:
        outputs: n answers, by index.
        prompt_logprobs: one entry a prompt token, the first None, if they were asked for.
        arrival_s, first_token_s, last_token_s: on the machine's monotonic clock.
        num_cached_tokens: prompt tokens read from the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    outputs: list[CompletionOutput]
    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    def take(self, output: SequenceOutput, now: float) -> None:
        """Adds what one step brought.

        Raises:
            CloisterError: the sequence ended without an answer; the message says why.
        """
        check_end(output)
        answer = self.outputs[output.index]
        answer.text += output.text
        answer.token_ids.extend(output.token_ids)
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        if output.logprobs is not None:
            answer.logprobs = (answer.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.token_ids:
            self.first_token_s = self.first_token_s or now
            self.last_token_s = now


# Progress of a batch: a callback, or a bar on standard error.


Progress = Callable[[int, int], None]
"""Called with (prompts answered, prompts in all)."""


@contextmanager
def reporting(on_progress: Progress | bool | None, num_prompts: int) -> Iterator[Progress]:
    """Yields what to call after each prompt: the callback, a bar for True, nothing for None and False."""
    if callable(on_progress):
        yield on_progress
    elif not on_progress:
        yield lambda num_done, total: None
    else:
        with _bar(num_prompts) as report:
            yield report


@contextmanager
def _bar(num_prompts: int) -> Iterator[Progress]:
    from rich.console import Console  # only who wants a bar waits for it
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("prompts", total=num_prompts)
        yield lambda num_done, total: bars.update(task, completed=num_done)


# Prompts: one or many, as text or token ids.


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
