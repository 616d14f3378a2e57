"""`/v1/embeddings`, `/v1/score`, `/v1/rerank`, and vLLM's `/classify` and `/pooling`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.embeddings import (
    EmbeddingJob,
    EmbeddingUsage,
    read_embeddings,
    run_pooled,
    usage_of,
    vector_of,
    write_embeddings,
)
from cloister.server.route_table import RouteTable
from cloister.server.scoring import rank_documents, read_classify, read_rerank, read_score, score_pairs, write_classes
from cloister.server.state import admission_of, state_of
from cloister.types.request import Embedding

router = RouteTable()


class PooledItem(msgspec.Struct, frozen=True):
    index: int
    data: list[float]
    object: Literal["pooling"] = "pooling"


class PooledList(msgspec.Struct, frozen=True):
    """Reply of /pooling."""

    id: str
    created: int
    model: str
    data: list[PooledItem]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Makes a vector of each text; the texts of a request are computed concurrently."""
    state = state_of(request)
    asked = await state.off_the_loop(read_embeddings, state.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(state.generate, asked.job)
    return Response(await state.off_the_loop(write_embeddings, asked, embeddings), media_type="application/json")


# `/v1/score` and `/v1/rerank`, with the alternative paths of reranker clients.


@router.post("/v1/score")
async def create_score(request: Request) -> Response:
    """Scores the similarity of pairs of texts."""
    state = state_of(request)
    asked = await state.off_the_loop(read_score, state.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(state.generate, asked.job)
    return await state.answer_off_the_loop(score_pairs, asked, embeddings)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def create_ranking(request: Request) -> Response:
    """Sorts documents by similarity to a query."""
    state = state_of(request)
    asked = await state.off_the_loop(read_rerank, state.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(state.generate, asked.job)
    return await state.answer_off_the_loop(rank_documents, asked, embeddings)


@router.post("/v1/classify")  # the one that can be asked sealed
@router.post("/classify")
async def create_classification(request: Request) -> Response:
    """Classifies each text with the model's classes."""
    state = state_of(request)
    asked = await state.off_the_loop(read_classify, state.reader, await request.body(), admission_of(request))
    scores = await run_pooled(state.generate, asked.job)
    return await state.answer_off_the_loop(write_classes, asked, scores)


@router.post("/pooling")
async def create_pooled(request: Request) -> Response:
    """Makes a vector of each text, as /v1/embeddings does."""
    state = state_of(request)
    asked = await state.off_the_loop(read_embeddings, state.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(state.generate, asked.job)
    return await state.answer_off_the_loop(_write_pooled, asked, embeddings)


def _write_pooled(asked: EmbeddingJob, embeddings: Sequence[Embedding]) -> PooledList:
    items = [PooledItem(i, vector_of(embedding).tolist()) for i, embedding in enumerate(embeddings)]
    return PooledList(f"pool-{secrets.token_hex(12)}", int(time.time()), asked.job.model_name, items, usage_of(asked.job))
