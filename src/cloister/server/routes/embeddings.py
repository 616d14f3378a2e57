"""`/v1/embeddings`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.embeddings import read_embeddings, run_pooled, write_embeddings
from cloister.server.state import admission_of, state_of

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    """Makes a vector of each text; the texts of a request are computed side by side."""
    state = state_of(request)
    asked = await state.off_the_loop(read_embeddings, state.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(state.generate, asked.job)
    return Response(await state.off_the_loop(write_embeddings, asked, embeddings), media_type="application/json")
