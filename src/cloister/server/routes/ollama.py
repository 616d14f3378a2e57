"""Ollama's routes: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, `/api/tags` and others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.calls import call_of
from cloister.server.choices import read_turns
from cloister.server.embeddings import run_pooled, vector_of
from cloister.server.jobs import GenerationJob, Numbered, Tally, run_job
from cloister.server.ollama.models import list_running, list_tags, show_model
from cloister.server.ollama.reading import Asked, find_name, read_chat, read_embed, read_embedding, read_generate
from cloister.server.ollama.schemas import NO_FIELDS, OllamaPullBody, OllamaShowBody
from cloister.server.ollama.writing import (
    NDJSON,
    Gain,
    LineWriter,
    OllamaChatLine,
    OllamaGenerateLine,
    ToolCallCollector,
    durations,
    lines,
    shape_chat,
    shape_generate,
    write_failure,
)
from cloister.server.parse import parse_body
from cloister.server.route_table import RouteTable
from cloister.server.routes.health import VERSION
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.server.stream import Chunks, Ending, open_stream
from cloister.types.errors import NotFoundError, PolicyError

router = RouteTable()

LINES: Final = Ending(b"", write_failure)


class OllamaEmbeddings(msgspec.Struct, frozen=True):
    """Reply of /api/embed; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OllamaEmbedding(msgspec.Struct, frozen=True):
    """Reply of /api/embeddings."""

    embedding: list[float]


class OllamaStatus(msgspec.Struct, frozen=True):
    """Reply of /api/pull."""

    status: str


@router.post("/api/chat")
async def chat(request: Request) -> Response:
    """Answers a conversation, as a stream by default."""
    state = state_of(request)
    asked = await state.off_the_loop(read_chat, state.reader, await request.body(), admission_of(request))
    return await _answer(state, asked, LineWriter(OllamaChatLine, shape_chat, asked.model_name, call_of(request.scope)))


@router.post("/api/generate")
async def generate(request: Request) -> Response:
    """Answers a prompt, or continues a raw one, as a stream by default."""
    state = state_of(request)
    asked = await state.off_the_loop(read_generate, state.reader, await request.body(), admission_of(request))
    writer = LineWriter(OllamaGenerateLine, shape_generate, asked.model_name, call_of(request.scope))
    return await _answer(state, asked, writer)


async def _answer(state: ServerState, asked: Asked, writer: LineWriter) -> Response:
    if asked.job is None:
        return Response(lines([writer.present()]), media_type=NDJSON) if asked.stream else json_response(writer.present())
    outputs = run_job(state.generate, asked.job)
    if asked.stream:
        return await open_stream(_stream(asked.job, writer, outputs), LINES, NDJSON)
    return json_response(await _gather(asked.job, writer, outputs))


async def _gather(
    job: GenerationJob, writer: LineWriter, outputs: AsyncGenerator[Numbered, None]
) -> OllamaChatLine | OllamaGenerateLine:
    """Returns the whole reply."""
    tally, reader, whole, reason = Tally(job), ToolCallCollector(), Gain(), ""
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            whole.add(reader.read(turn))
            reason = turn.finish_reason or ""
    return writer.last(whole, reason, tally.usage(), job)


async def _stream(job: GenerationJob, writer: LineWriter, outputs: AsyncGenerator[Numbered, None]) -> Chunks:
    """Yields lines."""
    tally, reader, reason = Tally(job), ToolCallCollector(), ""
    async with aclosing(read_turns(job, outputs, tally)) as turns:
        async for turn in turns:
            if gain := reader.read(turn):
                yield lines([writer.more(gain)])
            reason = turn.finish_reason or ""
    yield lines([writer.last(Gain(), reason, tally.usage(), job)])


@router.post("/api/embed")
async def embed(request: Request) -> Response:
    """Makes a vector of each text."""
    state, call = state_of(request), call_of(request.scope)
    name, job = await state.off_the_loop(read_embed, state.reader, await request.body(), admission_of(request))
    if job is None:
        return json_response(OllamaEmbeddings(name, []))
    vectors = await run_pooled(state.generate, job)
    times = durations(call, job)
    return await state.off_the_loop(
        lambda: json_response(
            OllamaEmbeddings(
                name,
                [vector_of(vector).tolist() for vector in vectors],
                times.get("total_duration", 0),
                times.get("load_duration", 0),
                job.num_prompt_tokens,
            )
        )
    )


@router.post("/api/embeddings")
async def embed_one(request: Request) -> Response:
    """Makes a vector of one text."""
    state = state_of(request)
    job = await state.off_the_loop(read_embedding, state.reader, await request.body(), admission_of(request))
    if job is None:
        return json_response(OllamaEmbedding([]))
    (vector,) = await run_pooled(state.generate, job)
    return json_response(OllamaEmbedding(vector_of(vector).tolist()))


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """Lists the served models."""
    return json_response(list_tags(state_of(request)))


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """Lists the loaded models."""
    return json_response(list_running(state_of(request)))


@router.post("/api/show")
async def show(request: Request) -> Response:
    """Describes one model."""
    state = state_of(request)
    body = await state.off_the_loop(parse_body, await request.body(), OllamaShowBody, NO_FIELDS)
    return json_response(show_model(state, find_name(state.reader, body.model or body.name)))


@router.post("/api/pull")
async def pull(request: Request) -> Response:
    """Checks that a model is available. A missing one is never fetched: clients cannot start downloads."""
    state = state_of(request)
    body = await state.off_the_loop(parse_body, await request.body(), OllamaPullBody, NO_FIELDS)
    try:
        find_name(state.reader, body.model or body.name)
    except NotFoundError:
        raise PolicyError(
            f"This server downloads nothing at a client's request; it serves `{state.reader.model_name}`. Its operator can"
            " start it with another one (`cloister serve --model NAME`)."
        ) from None
    done = OllamaStatus("success")
    return json_response(done) if body.stream is False else Response(lines([done]), media_type=NDJSON)


@router.get("/api/version")
async def version() -> Response:
    """Returns the version of Cloister."""
    return json_response(VERSION)
