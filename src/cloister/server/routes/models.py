"""`/v1/models`, `/v1/models/{id}`, `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloister.engine.adapters import AdapterManager
from cloister.server.answers import Model, ModelList
from cloister.server.errors import invalid
from cloister.server.parse import parse_body
from cloister.server.prompts import unknown_model
from cloister.server.route_table import RouteTable
from cloister.server.schemas import Strict
from cloister.server.state import ServerState, admission_of, json_response, state_of
from cloister.types.request import AdapterInfo

router = RouteTable()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Lists the served model and its adapters."""
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
    """Returns an adapter as an entry of the list, without its directory, which is not public."""
    served = next(_served_names(state))
    limits = served.max_model_len, served.default_max_tokens
    return Model(adapter.name, adapter.created_s, *limits, root=served.root, parent=served.id)


def _served_names(state: ServerState) -> Iterator[Model]:
    """Yields the model under each of its names."""
    model = state.reader.model
    for name in (state.reader.model_name, *state.reader.other_names):
        yield Model(name, model.created_s, model.max_model_len, model.default_max_tokens, root=model.name)


class LoadBody(Strict):
    lora_name: str = Field(max_length=128)
    lora_path: str = Field(max_length=4096)


class Unloaded(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: Literal["model"] = "model"


class UnloadBody(Strict):
    lora_name: str = Field(max_length=128)
    lora_int_id: int | None = None  # sent by vLLM's clients; redundant with the name


@router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request) -> Response:
    """Loads an adapter from a directory of this machine; it is then listed as a model."""
    state = state_of(request)
    adapters = _check_operator(request, state)
    body = await state.off_the_loop(parse_body, await request.body(), LoadBody)
    if body.lora_name in (state.reader.model_name, *state.reader.other_names):
        raise invalid("`lora_name` is a name of the model itself; choose another one.", "lora_name")
    return json_response(adapter_model(state, await adapters.load(body.lora_name, body.lora_path)))


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request) -> Response:
    """Unloads an adapter when the requests that use it have ended."""
    state = state_of(request)
    adapters = _check_operator(request, state)
    body = await state.off_the_loop(parse_body, await request.body(), UnloadBody)
    await adapters.unload(body.lora_name)
    return json_response(Unloaded(body.lora_name))


def _check_operator(request: Request, state: ServerState) -> AdapterManager:
    """Returns the adapters of the engine, if the requester may change them.

    Raises:
        PolicyError: the requester may not.
    """
    state.reader.gate.check_operator(admission_of(request))
    return state.engine.adapters
