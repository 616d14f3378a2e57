"""`/v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cloister.server.answers import Model, ModelList
from cloister.server.prompts import unknown_model
from cloister.server.state import ServerState, json_response, state_of
from cloister.types.request import AdapterInfo

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Lists the model that is served, and its adapters."""
    state = state_of(request)
    adapters = [adapter_model(state, adapter) for adapter in state.reader.adapters.values()]
    return json_response(ModelList([*_served_names(state), *adapters]))


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request, model_id: str) -> Response:
    """Returns one model; names of hub models have a slash in them."""
    state = state_of(request)
    if model_id in state.reader.adapters:
        return json_response(adapter_model(state, state.reader.adapters[model_id]))
    served = next((model for model in _served_names(state) if model.id == model_id), None)
    if served is None:
        raise unknown_model(state.reader.model_name)
    return json_response(served)


def adapter_model(state: ServerState, adapter: AdapterInfo) -> Model:
    """Returns an adapter as an entry of the list; its directory is nobody's business."""
    served = next(_served_names(state))
    limits = served.max_model_len, served.default_max_tokens
    return Model(adapter.name, adapter.created_s, *limits, root=served.root, parent=served.id)


def _served_names(state: ServerState) -> Iterator[Model]:
    """Yields the model under each of its names."""
    model = state.reader.model
    for name in (state.reader.model_name, *state.reader.other_names):
        yield Model(name, model.created_s, model.max_model_len, model.default_max_tokens, root=model.name)
