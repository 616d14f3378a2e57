"""Sends a request to the application of the model that it names, of several that take turns in memory (`model_switcher`).

Questions about the server itself (health, metrics, the page) go to the model that is there, and load none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.engine.client import EngineClient
from cloister.server.answers import Model, ModelList
from cloister.server.metrics import Exposition
from cloister.server.middleware.failures import send_error
from cloister.server.model_switcher import ModelSwitcher
from cloister.server.ollama.models import list_entries
from cloister.server.ollama.names import served_name
from cloister.types.errors import CloisterError, NotFoundError
from cloister.types.request import ModelInfo

HEALTH, MODELS, TAGS = "/health", "/v1/models", "/api/tags"


@dataclass(frozen=True, slots=True)
class _Template:
    """Stands in a scope for a route, so that the request is counted under its template."""

    path: str


ONE_MODEL = _Template("/v1/models/{model_id:path}")


@dataclass(frozen=True, slots=True)
class LoadedApp:
    """A model in memory (protocol `model_switcher.ResidentModel`): its routes, its engine, and its figures."""

    app: ASGIApp
    engine: EngineClient
    exposition: Exposition

    async def drain(self, timeout_s: float) -> None:
        await self.engine.drain(timeout_s)

    def count_reply(self, route: str, status: int) -> None:
        self.exposition.count_reply(route, status)


def list_entry(name: str, root: str, model: ModelInfo | None = None) -> Model:
    """Returns a model's entry in the list; how long its context is, is not known before it was loaded once."""
    if model is None:
        return Model(name, 0, None, None, root=root)
    return Model(name, model.created_s, model.max_model_len, model.default_max_tokens, root=root)


class _Named(msgspec.Struct):
    """As much of a body as says which model it is for."""

    model: str | None = None


class ModelSwitch:
    """One application in front of those of several models.

    Args:
        models: served name -> its entry in the list of models; the first one answers requests that name none.
    """

    def __init__(self, switcher: ModelSwitcher, models: Mapping[str, Model]) -> None:
        self._switcher = switcher
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] != "POST":
            await self._answer_question(scope, receive, send)
            return
        first = await receive()
        try:
            name = self._pick(first.get("body", b""))
            async with self._switcher.lend(name) as place:
                await place.app(scope, _replay(first, receive), send)
        except CloisterError as error:
            await send_error(send, error)

    def _pick(self, body: bytes) -> str:
        """Returns the model that a body names. What cannot be read is left to the application, which says what is wrong."""
        try:
            name = served_name(msgspec.json.decode(body, type=_Named).model, self._models)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            name = None
        if name is None:
            return self._switcher.name or next(iter(self._models))
        if name not in self._models:
            served = ", ".join(f"`{known}`" for known in self._models)
            raise NotFoundError(f"This server has no such model; it serves {served}.", param="model", code="model_not_found")
        return name

    async def _answer_question(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["method"] == "GET" else ""
        if path == HEALTH and self._switcher.is_changing:
            await _send_json(send, b'{"status":"ok"}')  # loading has a deadline: it is progress
        elif path == MODELS:
            await _send_json(send, msgspec.json.encode(ModelList(list(self._models.values()))))
        elif path == TAGS:
            await _send_json(send, msgspec.json.encode(list_entries(self._models.values())))
        elif path.startswith(f"{MODELS}/") and (model := self._models.get(path.removeprefix(f"{MODELS}/"))) is not None:
            scope["route"] = ONE_MODEL
            await _send_json(send, msgspec.json.encode(model))
        else:
            app: ASGIApp = self._switcher.shown.app if self._switcher.shown is not None else _not_yet
            await app(scope, receive, send)


def _replay(first: Message, receive: Receive) -> Receive:
    """Returns a channel that says the first message again."""
    said: Sequence[Message] = [first]

    async def listen() -> Message:
        nonlocal said
        if said:
            message, said = said[0], ()
            return message
        return await receive()

    return listen


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _not_yet(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send_error(send, NotFoundError("No model has been loaded yet; ask again in a moment.", code="not_loaded"))
