"""The sequences of a job gathered into whole answers, for replies that are not streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from cloister.server.answers import Usage
from cloister.server.generation import GenerationJob, Numbered, Tally
from cloister.types.request import SequenceOutput, TokenLogprobs


@dataclass(slots=True)
class Choice:
    """One sequence as it grows.

    Attributes:
        logprobs: None unless the request asked for them.
        prompt_logprobs: on the first sequence of a prompt, if they were asked for.
    """

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str = ""

    @property
    def mean_logprob(self) -> float:
        """How likely its tokens are, on average."""
        return sum(entry.logprob for entry in self.logprobs or ()) / max(1, len(self.logprobs or ()))

    def add(self, output: SequenceOutput) -> None:
        """Takes what one step added."""
        self.texts.append(output.text)
        if self.logprobs is not None:
            self.logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value


async def collect(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> tuple[list[Choice], Usage]:
    """Waits for every sequence of a job and returns them in order, with the job's counts."""
    wants_logprobs = job.requests[0].sampling.logprobs is not None
    choices = [Choice(logprobs=[] if wants_logprobs else None) for _ in range(job.num_choices)]
    tally = Tally(job)
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            choices[number * job.n + output.index].add(output)
    return choices, tally.usage()


def choose_best(job: GenerationJob, choices: Sequence[Choice]) -> list[int]:
    """Returns the places of the answers that the reply has, prompt by prompt: all, or the likeliest ones, the best first."""
    if job.num_kept is None:
        return list(range(len(choices)))
    kept: list[int] = []
    for first in range(0, len(choices), job.n):
        ranked = sorted(range(first, first + job.n), key=lambda place: -choices[place].mean_logprob)
        kept += ranked[: job.num_kept]
    return kept
