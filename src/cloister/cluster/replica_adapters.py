"""The adapters of several replicas, which are the same in all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cloister.engine.client import EngineClient
from cloister.types.errors import CloisterError, InvalidRequestError
from cloister.types.request import AdapterInfo


class ReplicaAdapters:
    """The adapters of all replicas (protocol `engine.adapters.AdapterManager`).

    Attributes:
        are_fixed: none may be loaded or unloaded, because replicas get new engines.
    """

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self.are_fixed = False
        self._replicas = replicas

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]:
        """Those of the first replica, which loads an adapter last and unloads it first: the others have them too."""
        return self._replicas[0].adapters.loaded

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Loads an adapter into one replica after another; if one cannot load it, those before it unload it again."""
        self._check_free()
        done: list[EngineClient] = []
        for replica in (*self._replicas[1:], self._replicas[0]):
            try:
                adapter = await replica.adapters.load(name, path)
            except CloisterError:
                await asyncio.gather(*(earlier.adapters.unload(name) for earlier in done), return_exceptions=True)
                raise
            done.append(replica)
        return adapter

    async def unload(self, name: str) -> None:
        """Unloads an adapter from every replica."""
        self._check_free()
        await asyncio.gather(*(replica.adapters.unload(name) for replica in self._replicas))

    def _check_free(self) -> None:
        if self.are_fixed:
            raise InvalidRequestError("a rolling update is under way; load or unload the adapter when it has ended")
