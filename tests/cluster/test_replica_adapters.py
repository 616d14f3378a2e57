"""The adapters of several replicas are the same in all of them, whenever a call ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cloister.cluster.replica_adapters import ReplicaAdapters
from cloister.types.request import AdapterInfo


class Adapters:
    """Those of one replica, which answers in the turn in which it is told to."""

    def __init__(self) -> None:
        self.loaded: dict[str, AdapterInfo] = {}
        self.answer: asyncio.Future[None] | None = None

    async def load(self, name: str, path: str) -> AdapterInfo:
        self.answer = asyncio.get_running_loop().create_future()
        await self.answer
        self.loaded[name] = AdapterInfo(name=name, digest="digest", path=path, rank=1)
        return self.loaded[name]

    async def unload(self, name: str) -> None:
        self.loaded.pop(name, None)


@pytest.mark.parametrize("turns", range(6))
def test_a_load_that_is_cancelled_just_as_it_ends_stays_in_all_replicas_or_in_none(turns: int) -> None:
    async def run() -> None:
        replicas = [Adapters(), Adapters()]
        clients: list[Any] = [SimpleNamespace(adapters=each) for each in replicas]
        adapters = ReplicaAdapters(lambda: clients)
        call = asyncio.create_task(adapters.load("a", "path"))
        for replica in reversed(replicas):  # the first one is the last
            for _ in range(8):
                await asyncio.sleep(0)
            assert replica.answer is not None
            replica.answer.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        [ended] = await asyncio.gather(call, return_exceptions=True)
        for _ in range(8):
            await asyncio.sleep(0)
        is_there = not isinstance(ended, asyncio.CancelledError)
        assert [("a" in replica.loaded) for replica in replicas] == [is_there, is_there]

    asyncio.run(run())
