"""The adapters of several replicas, which are the same in all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from cloister.engine.adapters import CHANGING
from cloister.engine.client import EngineClient
from cloister.types.errors import CloisterError, InvalidRequestError
from cloister.types.request import AdapterInfo


class ReplicaAdapters:
    """The adapters of all replicas (protocol `engine.adapters.AdapterManager`).

    Args:
        list_clients: returns the clients of those that have engines, at least one.

    Attributes:
        are_fixed: none may be loaded or unloaded, because replicas get new engines.
        num_calls: loads and unloads that have not ended.
        settle: waits until no engine is being added or removed; None if all run. None begins while there are calls.
    """

    def __init__(self, list_clients: Callable[[], Sequence[EngineClient]]) -> None:
        self.are_fixed = False
        self.num_calls = 0
        self.settle: Callable[[], Awaitable[None]] | None = None
        self._list_clients = list_clients
        self._changing: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]:
        """Those of the first replica, which loads an adapter last and unloads it first: the others have them too."""
        return self._list_clients()[0].adapters.loaded

    def as_setting(self) -> str | None:
        """Returns the setting `lora` that gives another engine the same adapters."""
        return self._list_clients()[0].adapters.as_setting(None)

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Loads an adapter into one replica after another; if one cannot load it, or the call is cancelled, those before it
        unload it again."""
        loading = asyncio.create_task(self._load(name, path), name="loading of an adapter")
        self._keep(loading)
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if not loading.cancel() and loading.exception() is None:  # it ended in the same turn
                self._keep(asyncio.create_task(self.unload(name), name="unloading of an adapter that nobody waits for"))
            raise  # else it takes back what it has done, and until then no other call changes this name

    async def _load(self, name: str, path: str) -> AdapterInfo:
        done: list[EngineClient] = []
        async with self._calling(name):
            first, *others = self._list_clients()
            try:
                for replica in (*others, first):
                    adapter = await replica.adapters.load(name, path)
                    done.append(replica)
            except (CloisterError, asyncio.CancelledError):
                await self._take_back(name, done)
                raise
        return adapter

    async def _take_back(self, name: str, done: Sequence[EngineClient]) -> None:
        await asyncio.gather(*(earlier.adapters.unload(name) for earlier in done), return_exceptions=True)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who called may have gone

    async def unload(self, name: str) -> None:
        """Unloads an adapter from every replica."""
        async with self._calling(name):
            await asyncio.gather(*(replica.adapters.unload(name) for replica in self._list_clients()))

    @property
    def are_changing(self) -> bool:
        """Whether one is being loaded or unloaded, or shall go when its requests have ended."""
        return self.num_calls > 0 or any(client.adapters.is_changing for client in self._list_clients())

    @contextlib.asynccontextmanager
    async def _calling(self, name: str) -> AsyncIterator[None]:
        if self.are_fixed:
            raise InvalidRequestError("a rolling update is under way; load or unload the adapter when it has ended")
        if name in self._changing:  # two calls would reach the replicas in different orders
            raise InvalidRequestError(CHANGING, param="lora_name")
        self._changing.add(name)
        self.num_calls += 1
        try:
            if self.settle is not None:
                await self.settle()  # a call would start an engine again that ends
            yield
        finally:
            self.num_calls -= 1
            self._changing.discard(name)
