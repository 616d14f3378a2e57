"""vLLM's routes beside the OpenAI API: `/ping`, `/load`, `/pooling`."""

from __future__ import annotations

import secrets
import time
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.embeddings import EmbeddingUsage, read_embeddings, run_pooled, usage_of, vector_of
from cloister.server.routes.health import report_health
from cloister.server.state import admission_of, json_response, state_of
from cloister.types.errors import PolicyError

router = APIRouter()


class Load(msgspec.Struct, frozen=True):
    """Reply of /load: requests that the engine works on or that wait for it."""

    server_load: int


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


router.add_api_route("/ping", report_health, methods=["GET", "POST"])


@router.get("/load")
async def report_load(request: Request) -> Response:
    """Says how many requests are at work, where the profile lets single ones be counted."""
    state = state_of(request)
    policy = state.reader.gate.policy
    if policy.counts_only:
        raise PolicyError(
            f"{policy.ruling('request-log').rule}: the profile {policy.profile.value!r} tells sums over many requests only; "
            "/metrics has them."
        )
    return json_response(Load(state.calls.num_at_work))


@router.post("/pooling")
async def create_pooled(request: Request) -> Response:
    """Makes a vector of each text, as /v1/embeddings does."""
    state = state_of(request)
    asked = await state.off_the_loop(read_embeddings, state.reader, await request.body(), admission_of(request))
    embeddings = await run_pooled(state.generate, asked.job)
    items = [PooledItem(i, vector_of(embedding).tolist()) for i, embedding in enumerate(embeddings)]
    reply = PooledList(f"pool-{secrets.token_hex(12)}", int(time.time()), asked.job.model_name, items, usage_of(asked.job))
    return json_response(reply)
