"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.answers import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Echo,
    LegacyLogprobs,
    Usage,
    joined,
)
from cloister.server.choices import choose_best, collect
from cloister.server.jobs import GenerationJob, Numbered, Tally, run_job
from cloister.server.route_table import RouteTable
from cloister.server.state import admission_of, json_response, state_of
from cloister.server.stream import Chunks, EventTemplate, events, open_stream
from cloister.types.request import SequenceOutput, TokenLogprobs

router = RouteTable()

PromptLogprobs = list[TokenLogprobs | None]


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues one or more prompts, at once or as a stream."""
    state = state_of(request)
    job = state.follow(await state.read(state.reader.read_completion, await request.body(), admission_of(request)))
    outputs = run_job(state.generate, job)
    if job.stream:
        return await open_stream(stream_completion(job, outputs))
    return json_response(await answer_completion(job, outputs))


async def answer_completion(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> CompletionResponse:
    """Returns the whole reply."""
    choices, usage = await collect(job, outputs)
    # Sequences of one prompt share its log-probabilities, which arrive with the first of them.
    heads = [await _write_prompt(echo, choices[number * job.n].prompt_logprobs) for number, echo in enumerate(job.echoes)]
    whole: list[CompletionChoice] = []
    for i, number in enumerate(choose_best(job, choices)):
        choice, prompt = choices[number], number // job.n
        text = (job.echoes[prompt].text if job.echoes else "") + "".join(choice.texts)
        logprobs = None if choice.writer is None else joined(*(heads[prompt] if heads else ()), *choice.logprobs)
        whole.append(CompletionChoice(i, text, logprobs, choice.finish_reason))
    return _completion(job, whole, usage)


async def _write_prompt(echo: Echo, prompt_logprobs: PromptLogprobs | None) -> list[CompletionLogprobs]:
    """Returns the log-probabilities of a prompt in pieces, if it has some; other tasks have a turn between them."""
    written = []
    for piece in () if prompt_logprobs is None else LegacyLogprobs(echo).write_prompt(prompt_logprobs):
        written.append(piece)
        await asyncio.sleep(0)
    return written


async def stream_completion(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events: the echo first if requested, then text deltas, and last the usage if requested."""
    tally = Tally(job)
    writer = _StreamWriter(job)
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            if not job.continuous_usage and (event := writer.write_text(number, output)):
                yield event
            elif chunks := writer.add(number, output):
                usage = tally.usage() if job.continuous_usage else None
                yield events(chunks if usage is None else [replace(chunk, usage=usage) for chunk in chunks])
    if job.include_usage:
        yield events([_completion(job, [], tally.usage())])


class _StreamWriter:
    """Converts outputs to chunks; if an echo needs log-probabilities, it buffers outputs until they arrive."""

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._scribes: dict[int, _Scribe] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._held: dict[int, list[SequenceOutput]] = {}
        self._templates: dict[int, EventTemplate] = {}

    def write_text(self, number: int, output: SequenceOutput) -> bytes:
        """Returns the event of a text-only output, and None for any other."""
        template = self._templates.get(number * self._job.n + output.index)
        if template is None or not output.text or output.finish_reason is not None or output.logprobs is not None:
            return b""
        return template.fill(output.text)

    def add(self, number: int, output: SequenceOutput) -> list[CompletionResponse]:
        """Returns the chunks that can be sent after an output of prompt `number`."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = output.prompt_logprobs
        ready = [*self._held.pop(number, []), output]
        if self._job.requests[0].sampling.prompt_logprobs is not None and number not in self._prompt_logprobs:
            self._held[number] = ready  # every sequence's echo needs them, but only the first sequence has them
            return []
        return [chunk for item in ready if (chunk := self._write(number, item)) is not None]

    def _write(self, number: int, output: SequenceOutput) -> CompletionResponse | None:
        index = number * self._job.n + output.index
        text, head = "", None
        if index not in self._scribes:
            self._scribes[index] = _Scribe(self._job, number)
            self._templates[index] = EventTemplate(partial(_text_chunk, self._job, index))
            text, head = self._scribes[index].begin(self._prompt_logprobs.get(number))
        text += output.text
        logprobs = _joined(head, self._scribes[index].go_on(output.logprobs))
        if not text and logprobs is None and output.finish_reason is None:
            return None
        reason = output.finish_reason.value if output.finish_reason is not None else None
        return _completion(self._job, [CompletionChoice(index, text, logprobs, reason)])


class _Scribe:
    """Writes one choice: its echo, and log-probabilities with continuous offsets."""

    def __init__(self, job: GenerationJob, number: int) -> None:
        self._echo: Echo | None = job.echoes[number] if job.echoes else None
        self._legacy = LegacyLogprobs(self._echo)

    def begin(self, prompt_logprobs: PromptLogprobs | None) -> tuple[str, CompletionLogprobs | None]:
        """Returns the echo's text, and its log-probabilities if any."""
        if self._echo is None:
            return "", None
        return self._echo.text, None if prompt_logprobs is None else self._legacy.add_prompt(prompt_logprobs)

    def go_on(self, logprobs: list[TokenLogprobs] | None) -> CompletionLogprobs | None:
        """Returns the log-probabilities of the next tokens."""
        return None if logprobs is None else self._legacy.add(logprobs)


def _joined(head: CompletionLogprobs | None, rest: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if head is None or rest is None:
        return rest if head is None else head
    return joined(head, rest)


def _text_chunk(job: GenerationJob, index: int, text: str) -> CompletionResponse:
    return _completion(job, [CompletionChoice(index, text)])


def _completion(job: GenerationJob, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionResponse:
    return CompletionResponse(
        id=job.job_id,
        created=job.created_s,
        model=job.model_name,
        system_fingerprint=job.system_fingerprint,
        choices=choices,
        usage=usage if usage is not None or job.include_usage else UNSET,
    )
