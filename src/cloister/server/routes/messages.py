"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.front import admission_of, front_of, json_response
from cloister.server.generation import Numbered, Tally, run_job
from cloister.server.job import Job
from cloister.server.messages import MessageWriter, write_failure
from cloister.server.stream import Chunks, Ending, named_events, open_stream
from cloister.server.turns import read_turns

router = APIRouter()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answers a conversation in blocks, at once or as a stream."""
    front = front_of(request)
    job = await front.off_the_loop(front.reader.read_message, await request.body(), admission_of(request))
    outputs = run_job(front.engine, job)
    if job.stream:
        return await open_stream(stream_message(job, outputs), Ending(b"", write_failure))
    return json_response(await answer_message(job, outputs))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Returns how many tokens a conversation's prompt has."""
    front = front_of(request)
    num_tokens = await front.off_the_loop(front.reader.count_message, await request.body())
    return json_response({"input_tokens": num_tokens})


async def answer_message(job: Job, outputs: AsyncGenerator[Numbered, None]) -> dict[str, Any]:
    """Returns the whole reply."""
    tally, writer = Tally(job), MessageWriter(job)
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            for _ in writer.add(turn):
                pass
    for _ in writer.end(tally.usage()):
        pass
    return writer.message(tally.usage())


async def stream_message(job: Job, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events."""
    tally, writer, is_begun = Tally(job), MessageWriter(job), False
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            chunk = b"" if is_begun else named_events(writer.begin(tally.usage()))
            is_begun = True
            if chunk := chunk + writer.write(turn):
                yield chunk
    yield named_events(writer.end(tally.usage()))
