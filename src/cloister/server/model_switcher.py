"""Several models behind one address, one of them in memory at a time.

A request for the model in memory goes on at once, unless somebody waits for another one: then it waits too, so that nobody
waits for ever. Once nothing runs, the model that was asked for first takes the place, and everybody who waits for it goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.types import ASGIApp

from cloister.engine.faults import describe
from cloister.server.errors import OverloadedError
from cloister.types.errors import CloisterError, EngineError

CLOSE_S: Final = 5.0
"""How long an engine that nobody uses may take to end."""
DRAINING: Final = "the server is shutting down; send the request again to another one, or later"
NOT_LOADED: Final = "this model could not be loaded; the operator finds the reason in the log"

_logger = logging.getLogger(__name__)


class ResidentModel(Protocol):
    """A model in memory: the application that answers for it, and how to let it go."""

    @property
    def app(self) -> ASGIApp: ...

    async def drain(self, timeout_s: float) -> None: ...

    def count_reply(self, route: str, status: int) -> None:
        """Counts a reply among the model's figures."""
        ...


Opener = Callable[[str], Awaitable[ResidentModel]]
"""Loads the model of that name; raises CloisterError when it cannot be."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    name: str
    admitted: asyncio.Future[None]


class ModelSwitcher:
    """Lends models to requests. Used from one event loop.

    Args:
        open: loads a model; called while no other one is in memory.
        patience_s: how long a request may wait for its model.

    Attributes:
        name: of the model in memory, None while there is none.
        shown: the place that was lent last, for questions that need no model in memory; None before the first.
    """

    def __init__(self, open: Opener, patience_s: float) -> None:
        self.name: str | None = None
        self.shown: ResidentModel | None = None
        self._open = open
        self._patience_s = patience_s
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
        """Loads the first model, before there are requests; raises what the opener raises."""
        self._place = self.shown = await self._open(name)
        self.name = name

    @asynccontextmanager
    async def lend(self, name: str) -> AsyncIterator[ResidentModel]:
        """Yields the place of model `name`, which stays in memory meanwhile.

        Raises:
            OverloadedError: it was not there in time.
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
        """Lends nothing any more, and lets what is in memory end what runs."""
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
                self._num_lent -= 1  # it was let in while it gave up
            self._advance()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"Other models were in use for {self._patience_s:g} s; try again later, or ask for the one in memory."
                ) from None
            raise

    def _advance(self) -> None:
        """Lets in whoever waits for the model in memory if nobody else comes first; changes models once nothing runs."""
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
        """Puts another model into the place."""
        try:
            await self._clear()
            self._place = self.shown = await self._open(name)
            self.name = name
        except Exception as error:
            reason = error.message if isinstance(error, CloisterError) else describe(error)
            _logger.error("model %s could not be loaded: %s", name, reason)
            self._refuse([waiter for waiter in self._queue if waiter.name == name], EngineError(NOT_LOADED))
        finally:
            self._change = None
        self._advance()

    async def _clear(self) -> None:
        place, self._place, self.name = self._place, None, None
        if place is not None:
            await place.drain(CLOSE_S)

    def _refuse(self, waiters: list[_Waiter], error: EngineError) -> None:
        self._queue = [waiter for waiter in self._queue if waiter not in waiters]
        for waiter in waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)
