"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
)
from cloister.server.choices import collect
from cloister.server.front import admission_of, front_of, json_response
from cloister.server.generation import Numbered, Tally, run_job
from cloister.server.job import Job
from cloister.server.logprobs import chat_logprobs
from cloister.server.stream import Chunks, EventTemplate, events, open_stream
from cloister.types.request import SequenceOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, at once or as a stream."""
    front = front_of(request)
    job = await front.off_the_loop(front.reader.read_chat, await request.body(), admission_of(request))
    outputs = run_job(front.engine, job)
    if job.stream:
        return await open_stream(stream_chat(job, outputs))
    return json_response(await answer_chat(job, outputs))


async def answer_chat(job: Job, outputs: AsyncGenerator[Numbered, None]) -> ChatCompletion:
    """Returns the whole reply."""
    choices, usage = await collect(job, outputs)
    return ChatCompletion(
        id=job.job_id,
        created=job.created_s,
        model=job.model_name,
        system_fingerprint=job.fingerprint,
        choices=[
            ChatChoice(
                index=i,
                message=ChatMessage("".join(choice.texts)),
                finish_reason=choice.finish_reason,
                logprobs=chat_logprobs(choice.logprobs) if choice.logprobs is not None else None,
            )
            for i, choice in enumerate(choices)
        ],
        usage=usage,
    )


async def stream_chat(job: Job, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events: the role first, then text as it comes, the finish reason alone, at last the usage if asked for."""
    tally, templates = Tally(job), dict[int, EventTemplate]()
    async with aclosing(outputs):
        async for number, output in outputs:
            tally.add(number, output)
            template = templates.get(output.index)
            if template is not None and output.finish_reason is None and output.logprobs is None:
                if output.text:
                    yield template.fill(output.text)
                continue
            choices = _gained(output)
            if template is None:
                templates[output.index] = EventTemplate(partial(_text_chunk, job, output.index))
                choices.insert(0, ChatChunkChoice(output.index, ChatDelta("assistant", "")))
            if choices:
                yield events(_chunk(job, [choice]) for choice in choices)
    if job.include_usage:
        yield events([_chunk(job, [], tally.usage())])


def _gained(output: SequenceOutput) -> list[ChatChunkChoice]:
    choices = []
    if output.text or output.logprobs:
        logprobs = chat_logprobs(output.logprobs) if output.logprobs is not None else None
        choices.append(ChatChunkChoice(output.index, ChatDelta(content=output.text), logprobs))
    if output.finish_reason is not None:
        choices.append(ChatChunkChoice(output.index, ChatDelta(), finish_reason=output.finish_reason.value))
    return choices


def _text_chunk(job: Job, index: int, text: str) -> ChatChunk:
    return _chunk(job, [ChatChunkChoice(index, ChatDelta(content=text))])


def _chunk(job: Job, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
    return ChatChunk(
        id=job.job_id,
        created=job.created_s,
        model=job.model_name,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=usage if job.include_usage else UNSET,
    )
