"""Converts the sequences of a job to answers: the delta of each step (text, reasoning, calls), and whole answers for unstreamed
replies."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from cloister.server.answers import CompletionLogprobs, Echo, LegacyLogprobs, Usage
from cloister.server.jobs import GenerationJob, Numbered, Tally
from cloister.text.answer_parser import AnswerParser
from cloister.text.parts import CallEnded, Part, Reasoning, Text
from cloister.types.request import FinishReason, SequenceOutput, TokenLogprobs

TOOL_CALLS: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class Turn:
    """The delta of one step to one answer.

    Attributes:
        finish_reason: "stop", "length" or "tool_calls" at the answer's end.
    """

    parts: list[Part]
    output: SequenceOutput
    finish_reason: str | None

    @property
    def index(self) -> int:
        """Index of the answer in the request."""
        return self.output.index

    @property
    def only_text(self) -> str | None:
        """The text of a step that added only text, as most do."""
        if self.finish_reason is not None or len(self.parts) != 1 or not isinstance(self.parts[0], Text):
            return None
        return self.parts[0].text


async def read_turns(job: GenerationJob, outputs: AsyncGenerator[Numbered, None], tally: Tally) -> AsyncGenerator[Turn, None]:
    """Yields and counts the deltas of every step of a job with one conversation."""
    readers: dict[int, _Reader] = {}
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            reader = readers.get(output.index)
            if reader is None:
                reader = readers[output.index] = _Reader(job)
            yield reader.read(output, tally)


class _Reader:
    """Reads one answer."""

    def __init__(self, job: GenerationJob) -> None:
        self._parser = None if job.form is None else AnswerParser(job.form)
        self._has_called = False

    def read(self, output: SequenceOutput, tally: Tally) -> Turn:
        is_end = output.finish_reason is not None
        parts = self._parse(output.text, is_end) if self._parser is None else self._parse_pieces(output, tally)
        self._has_called = self._has_called or any(isinstance(part, CallEnded) for part in parts)
        return Turn(parts, output, self._finish(output.finish_reason))

    def _parse_pieces(self, output: SequenceOutput, tally: Tally) -> list[Part]:
        """Parses each step's addition: a step's tokens are reasoning if the answer is still in its reasoning after the step."""
        assert self._parser is not None
        parts: list[Part] = []
        for piece in output.pieces:
            for part in self._parse(piece.text, output.finish_reason is not None):
                last = parts[-1] if parts else None
                if isinstance(part, Text | Reasoning) and type(last) is type(part):
                    parts[-1] = type(part)(last.text + part.text)
                else:
                    parts.append(part)
            if self._parser.is_reasoning:
                tally.add_reasoning(len(piece.token_ids))
        return parts

    def _parse(self, text: str, is_end: bool) -> list[Part]:
        if self._parser is None:
            return [Text(text)] if text else []
        parts = self._parser.push(text) if text else []
        return parts + self._parser.flush() if is_end else parts

    def _finish(self, reason: FinishReason | None) -> str | None:
        if reason is None:
            return None
        return TOOL_CALLS if self._has_called and reason is FinishReason.STOP else reason.value


def make_call_id() -> str:
    """Returns a random id for a call."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Choice:
    """One growing sequence.

    Attributes:
        writer: writes its log-probabilities; None unless the client asked for them.
        logprobs: what it has written.
        token_logprobs: the log-probability of each token, if the engine gave it.
        prompt_logprobs: on the first sequence of a prompt, if requested.
    """

    writer: LegacyLogprobs | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[CompletionLogprobs] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str = ""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens."""
        return sum(self.token_logprobs) / max(1, len(self.token_logprobs))

    def add(self, output: SequenceOutput) -> None:
        """Adds the output of one step."""
        self.texts.append(output.text)
        if output.logprobs:
            self.token_logprobs += [entry.logprob for entry in output.logprobs]
            if self.writer is not None:
                self.logprobs.append(self.writer.add(output.logprobs))
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value


async def collect(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> tuple[list[Choice], Usage]:
    """Waits for every sequence of a job and returns them in order, with the job's counts."""
    shows_logprobs = job.shows_logprobs and job.requests[0].sampling.logprobs is not None
    echoes: Sequence[Echo | None] = job.echoes or [None] * len(job.requests)
    choices = [Choice(LegacyLogprobs(echo) if shows_logprobs else None) for echo in echoes for _ in range(job.n)]
    tally = Tally(job)
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            choices[number * job.n + output.index].add(output)
    return choices, tally.usage()


def choose_best(job: GenerationJob, choices: Sequence[Choice]) -> list[int]:
    """Returns the indices of the answers in the reply, prompt by prompt: all, or the most likely ones, best first."""
    if job.num_kept is None:
        return list(range(len(choices)))
    kept: list[int] = []
    for first in range(0, len(choices), job.n):
        ranked = sorted(range(first, first + job.n), key=lambda place: -choices[place].mean_logprob)
        kept += ranked[: job.num_kept]
    return kept
