"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cloister.server.choices import read_turns
from cloister.server.jobs import GenerationJob, Numbered, Tally, run_job
from cloister.server.messages import MessageWriter, write_failure
from cloister.server.route_table import RouteTable
from cloister.server.state import admission_of, json_response, state_of
from cloister.server.stream import Chunks, Ending, named_events, open_stream

router = RouteTable()


@router.post("/v1/messages")
async def create_message(request: Request) -> Response:
    """Answers a conversation in blocks, at once or as a stream."""
    state = state_of(request)
    job = await state.read(state.reader.read_message, await request.body(), admission_of(request))
    outputs = run_job(state.generate, job)
    if job.stream:
        return await open_stream(stream_message(job, outputs), Ending(b"", write_failure))
    return json_response(await answer_message(job, outputs))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """Returns the number of prompt tokens of a conversation."""
    state = state_of(request)
    num_tokens = await state.off_the_loop(state.reader.count_message, await request.body())
    return json_response({"input_tokens": num_tokens})


async def answer_message(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> dict[str, Any]:
    """Returns the whole reply."""
    tally, writer = Tally(job), MessageWriter(job)
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            for _ in writer.add(turn):
                pass
    for _ in writer.end(tally.usage()):
        pass
    return writer.message(tally.usage())


async def stream_message(job: GenerationJob, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields events."""
    tally, writer, is_begun = Tally(job), MessageWriter(job), False
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            chunk = b"" if is_begun else named_events(writer.begin(tally.usage()))
            is_begun = True
            if chunk := chunk + writer.write(turn):
                yield chunk
    yield named_events(writer.end(tally.usage()))
