"""`/v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.answers import Model, ModelList
from cloister.server.front import Front, front_of, json_response
from cloister.server.prompts import unknown_model

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Lists the one model that is served."""
    return json_response(ModelList([_served(front_of(request))]))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    """Returns one model; names of hub models have a slash in them."""
    served = _served(front_of(request))
    if model_id != served.id:
        raise unknown_model(served.id)
    return json_response(served)


def _served(front: Front) -> Model:
    model = front.reader.model
    return Model(front.reader.model_name, model.created_s, model.max_model_len)
