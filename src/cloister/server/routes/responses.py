"""`/v1/responses` and `/v1/responses/{id}`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.choices import read_turns
from cloister.server.jobs import GenerationJob, Numbered, Tally, run_job
from cloister.server.responses.keeping import ResponseStore
from cloister.server.responses.writing import ResponseWriter
from cloister.server.route_table import RouteTable
from cloister.server.state import admission_of, json_response, state_of
from cloister.server.stream import Chunks, Ending, named_events, open_stream
from cloister.types.errors import NotFoundError

router = RouteTable()


class DeletedResponse(msgspec.Struct, frozen=True):
    """Reply to a DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answers a conversation in typed items, at once or as a stream."""
    state = state_of(request)
    owner = admission_of(request).owner
    job, body = await state.off_the_loop(state.reader.read_response, await request.body(), admission_of(request))
    writer = ResponseWriter(job, body, keeps_broken=job.stream)
    outputs = run_job(state.generate, job)

    async def keep(response: dict[str, Any]) -> None:
        if state.reader.responses is not None and owner is not None and body.store:
            await asyncio.to_thread(state.reader.responses.keep, owner, body, response)

    if job.stream:
        return await open_stream(stream_response(job, writer, outputs, keep), Ending(b"", writer.fail))
    response = await answer_response(job, writer, outputs)
    await keep(response)
    return json_response(response)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Returns a stored response."""
    store, owner = _store_of(request)
    return Response(store.find(owner, response_id).response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a response."""
    store, owner = _store_of(request)
    store.remove(owner, response_id)
    return json_response(DeletedResponse(response_id))


def _store_of(request: Request) -> tuple[ResponseStore, bytes]:
    store, owner = state_of(request).reader.responses, admission_of(request).owner
    if store is None or owner is None:
        raise NotFoundError("This server keeps no responses.", code="not_found")
    return store, owner


async def answer_response(
    job: GenerationJob, writer: ResponseWriter, outputs: AsyncGenerator[Numbered, None]
) -> dict[str, Any]:
    """Returns the whole reply: the content of a stream's last event."""
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


async def stream_response(
    job: GenerationJob,
    writer: ResponseWriter,
    outputs: AsyncGenerator[Numbered, None],
    keep: Callable[[dict[str, Any]], Awaitable[None]],
) -> Chunks:
    """Yields events; `keep` is called with the whole response before the last one."""
    tally, reason, is_begun = Tally(job), None, False
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            chunk = b"" if is_begun else named_events(writer.begin())
            is_begun = True
            if chunk := chunk + writer.write(turn):
                yield chunk
            reason = turn.finish_reason
    last = list(writer.end(reason, tally.usage()))
    await keep(last[-1]["response"])
    yield named_events(last)
