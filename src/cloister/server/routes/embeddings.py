"""`/v1/embeddings`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.embeddings import read_embeddings, run_pooled, write_embeddings
from cloister.server.front import admission_of, front_of, json_response
from cloister.server.scoring import rank_documents, read_rerank, read_score, score_pairs

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Makes a vector of each text; the texts of a request are computed side by side."""
    front = front_of(request)
    asked = await front.off_the_loop(read_embeddings, front.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(front.engine, asked.job)
    return Response(await front.off_the_loop(write_embeddings, asked, embeddings), media_type="application/json")


# `/v1/score` and `/v1/rerank`, with the other paths that clients of rerankers know.


@router.post("/v1/score")
async def create_score(request: Request) -> Response:
    """Says how alike pairs of texts are."""
    front = front_of(request)
    asked = await front.off_the_loop(read_score, front.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(front.engine, asked.job)
    return json_response(await front.off_the_loop(score_pairs, asked, embeddings))


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def create_ranking(request: Request) -> Response:
    """Sorts documents by how alike they are to a query."""
    front = front_of(request)
    asked = await front.off_the_loop(read_rerank, front.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(front.engine, asked.job)
    return json_response(await front.off_the_loop(rank_documents, asked, embeddings))
