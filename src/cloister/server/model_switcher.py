"""Several models behind one address, one of them in memory at a time.

A request for the loaded model runs immediately, unless requests wait for another model: then it waits too, so that no request
starves. Once nothing runs, the model that was requested first is loaded, and all requests waiting for it continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloister.engine.request_client import RequestClient
from cloister.server.answers import Model, ModelList
from cloister.server.errors import OverloadedError
from cloister.server.metrics import Exposition
from cloister.server.middleware.failures import send_error
from cloister.server.ollama.models import list_entries, served_name
from cloister.types.errors import CloisterError, EngineError, NotFoundError
from cloister.types.logs import describe
from cloister.types.request import ModelInfo

CLOSE_S: Final = 5.0
"""Timeout for stopping an unused engine."""
DRAINING: Final = "the server is shutting down; send the request again to another one, or later"
NOT_LOADED: Final = "this model could not be loaded; the operator finds the reason in the log"

_logger = logging.getLogger(__name__)


class ResidentModel(Protocol):
    """A loaded model: its application, and how to unload it."""

    @property
    def app(self) -> ASGIApp: ...

    async def drain(self, timeout_s: float) -> None: ...

    def count_reply(self, route: str, status: int) -> None:
        """Counts a reply in the model's metrics."""
        ...

    def count_unread(self) -> None:
        """Counts a reply that was ended unread there."""
        ...


Opener = Callable[[str], Awaitable[ResidentModel]]
"""Loads the model of that name; raises CloisterError on failure."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    name: str
    admitted: asyncio.Future[None]


class ModelSwitcher:
    """Gives requests access to models. Used from one event loop.

    Args:
        open: loads a model; called while no other one is loaded.
        patience_s: timeout of a request that waits for its model.
        settle: called after a model was loaded, when nothing refers to the previous one any longer and no request runs.

    Attributes:
        name: name of the loaded model, None if there is none.
        shown: the last loaded model, for requests that need none in memory; None before the first.
    """

    def __init__(self, open: Opener, patience_s: float, settle: Callable[[], None] = lambda: None) -> None:
        self.name: str | None = None
        self.shown: ResidentModel | None = None
        self._open = open
        self._patience_s = patience_s
        self._settle = settle
        self._place: ResidentModel | None = None
        self._num_lent = 0
        self._queue: list[_Waiter] = []
        self._change: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_changing(self) -> bool:
        """Whether another model is being loaded."""
        return self._change is not None

    async def begin(self, name: str) -> None:
        """Loads the first model, before there are requests; exceptions of the opener propagate."""
        await self._load(name)

    @asynccontextmanager
    async def lend(self, name: str) -> AsyncIterator[ResidentModel]:
        """Yields model `name`, which stays loaded meanwhile.

        Raises:
            OverloadedError: it was not loaded in time.
            EngineError: it could not be loaded, or the server shuts down.
        """
        if self._is_closed:
            raise EngineError(DRAINING)
        if self.name == name and not self._queue and self._change is None:
            self._num_lent += 1
        else:
            await self._wait(name)
        assert self._place is not None
        try:
            yield self._place
        finally:
            self._num_lent -= 1
            self._advance()

    async def drain(self, timeout_s: float) -> None:
        """Refuses further requests, and unloads the model after running requests have ended."""
        self._is_closed = True
        self._refuse(self._queue, EngineError(DRAINING))
        if self._change is not None:
            self._change.cancel()
            await asyncio.wait({self._change}, timeout=CLOSE_S)
        if self._place is not None:
            await self._place.drain(timeout_s)

    async def _wait(self, name: str) -> None:
        waiter = _Waiter(name, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._advance()
        try:
            async with asyncio.timeout(self._patience_s):
                await waiter.admitted
        except BaseException as error:
            if waiter in self._queue:
                self._queue.remove(waiter)
            elif waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                self._num_lent -= 1  # it was admitted just as it gave up
            self._advance()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"Other models were in use for {self._patience_s:g} s; try again later, or ask for the one in memory."
                ) from None
            raise

    def _advance(self) -> None:
        """Admits requests for the loaded model if no request for another came first; switches models once nothing runs."""
        if self._change is not None or self._is_closed or not self._queue:
            return
        if self._queue[0].name == self.name:
            self._admit()
        elif not self._num_lent:
            self._change = asyncio.create_task(self._swap(self._queue[0].name), name="model change")

    def _admit(self) -> None:
        let_in = [waiter for waiter in self._queue if waiter.name == self.name]
        self._queue = [waiter for waiter in self._queue if waiter.name != self.name]
        for waiter in let_in:
            if not waiter.admitted.done():
                self._num_lent += 1
                waiter.admitted.set_result(None)

    async def _swap(self, name: str) -> None:
        """Loads another model."""
        try:
            await self._clear()
            await self._load(name)
        except Exception as error:
            reason = error.message if isinstance(error, CloisterError) else describe(error)
            _logger.error("model %s could not be loaded: %s", name, reason)
            self._refuse([waiter for waiter in self._queue if waiter.name == name], EngineError(NOT_LOADED))
        finally:
            self._change = None
        self._advance()

    async def _load(self, name: str) -> None:
        self._place = self.shown = await self._open(name)
        self._settle()
        self.name = name

    async def _clear(self) -> None:
        place, self._place, self.name = self._place, None, None
        if place is not None:
            await place.drain(CLOSE_S)

    def _refuse(self, waiters: list[_Waiter], error: EngineError) -> None:
        self._queue = [waiter for waiter in self._queue if waiter not in waiters]
        for waiter in waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)


# Routes a request to the application of the model it names, one of several that take turns in memory.
#
# Requests about the server itself (health, metrics, the page) go to the loaded model, and load none.


HEALTH, MODELS, TAGS = "/health", "/v1/models", "/api/tags"


@dataclass(frozen=True, slots=True)
class _Template:
    """Placeholder for a route in a scope, so that the request is counted under its template."""

    path: str


ONE_MODEL = _Template("/v1/models/{model_id:path}")


@dataclass(frozen=True, slots=True)
class LoadedApp:
    """A loaded model (protocol `model_switcher.ResidentModel`): its routes, its engine, and its figures."""

    app: ASGIApp
    engine: RequestClient
    exposition: Exposition

    async def drain(self, timeout_s: float) -> None:
        await self.engine.drain(timeout_s)

    def count_reply(self, route: str, status: int) -> None:
        self.exposition.count_reply(route, status)

    def count_unread(self) -> None:
        self.exposition.count_unread()


def list_entry(name: str, root: str, model: ModelInfo | None = None) -> Model:
    """Returns a model's entry in the list; its context length is unknown before it was first loaded."""
    if model is None:
        return Model(name, 0, None, None, root=root)
    return Model(name, model.created_s, model.max_model_len, model.default_max_tokens, root=root)


class _Named(msgspec.Struct):
    """The part of a body that names the model."""

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
        """Returns the model that a body names. Invalid bodies are passed to the application, which reports the error."""
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
            await _send_json(send, b'{"status":"ok"}')  # loading counts as progress: it has a deadline
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
    """Returns a channel that replays the first message."""
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
