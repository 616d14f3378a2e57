"""`/v1/responses`."""

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
from cloister.server.responses.writing import ResponseWriter
from cloister.server.stream import Chunks, Ending, named_events, open_stream
from cloister.server.turns import read_turns

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answers a conversation in typed items, at once or as a stream."""
    front = front_of(request)
    job, body = await front.off_the_loop(front.reader.read_response, await request.body(), admission_of(request))
    writer = ResponseWriter(job, body, keeps_broken=job.stream)
    outputs = run_job(front.engine, job)
    if job.stream:
        return await open_stream(stream_response(job, writer, outputs), Ending(b"", writer.fail))
    return json_response(await answer_response(job, writer, outputs))


async def answer_response(job: Job, writer: ResponseWriter, outputs: AsyncGenerator[Numbered, None]) -> dict[str, Any]:
    """Returns the whole reply: what the last event of a stream holds."""
    tally, reason = Tally(job), None
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            for _ in writer.add(turn):
                pass
            reason = turn.finish_reason
    *_, last = writer.end(reason, tally.usage())
    response = last["response"]
    assert isinstance(response, dict)
    return response


async def stream_response(job: Job, writer: ResponseWriter, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events."""
    tally, reason, is_begun = Tally(job), None, False
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            chunk = b"" if is_begun else named_events(writer.begin())
            is_begun = True
            if chunk := chunk + writer.write(turn):
                yield chunk
            reason = turn.finish_reason
    yield named_events(writer.end(reason, tally.usage()))
