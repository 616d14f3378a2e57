"""What became of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from cloister.types.errors import EngineError, InvalidRequestError
from cloister.types.request import FinishReason, SequenceOutput, TokenLogprobs


def check_end(output: SequenceOutput) -> None:
    """Raises the CloisterError of a sequence that ended without an answer; the message says why."""
    if output.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
        kind = InvalidRequestError if output.finish_reason is FinishReason.REJECTED else EngineError
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
    """What became of one prompt.

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
