"""`/v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.answers import Model, ModelList
from cloister.server.front import Front, front_of, json_response
from cloister.server.prompts import unknown_model
from cloister.types.request import AdapterInfo

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Lists the model that is served, and its adapters."""
    front = front_of(request)
    adapters = [adapter_model(front, adapter) for adapter in front.reader.adapters.values()]
    return json_response(ModelList([*_served_names(front), *adapters]))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    """Returns one model; names of hub models have a slash in them."""
    front = front_of(request)
    if model_id in front.reader.adapters:
        return json_response(adapter_model(front, front.reader.adapters[model_id]))
    served = next((model for model in _served_names(front) if model.id == model_id), None)
    if served is None:
        raise unknown_model(front.reader.model_name)
    return json_response(served)


def adapter_model(front: Front, adapter: AdapterInfo) -> Model:
    """Returns an adapter as an entry of the list; its directory is nobody's business."""
    served = next(_served_names(front))
    limits = served.max_model_len, served.default_max_tokens
    return Model(adapter.name, adapter.created_s, *limits, root=served.root, parent=served.id)


def _served_names(front: Front) -> Iterator[Model]:
    """Yields the model under each of its names."""
    model = front.reader.model
    for name in (front.reader.model_name, *front.reader.other_names):
        yield Model(name, model.created_s, model.max_model_len, model.default_max_tokens, root=model.name)
