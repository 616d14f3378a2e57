"""Several models, one in memory at a time."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from cloister.engine.machine import freeze_gc_heap
from cloister.server.errors import OverloadedError
from cloister.server.model_switcher import ModelSwitcher
from cloister.types.errors import EngineError, ModelError
from tests import virtual_time


class Place:
    """A model in memory, which knows whether it still is."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.app = name, log, None

    async def drain(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        self.log.append(f"-{self.name}")

    def count_reply(self, route: str, status: int) -> None:
        pass

    def count_unread(self) -> None:
        pass


class Shelf:
    """Loads places, one after the other, and writes down what it did."""

    def __init__(self, load_s: float = 0.0) -> None:
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.load_s = load_s

    async def open(self, name: str) -> Place:
        await asyncio.sleep(self.load_s)
        if name in self.broken:
            raise ModelError("no such file")
        self.log.append(f"+{name}")
        return Place(name, self.log)


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10):
            return await scenario()

    return virtual_time.run(bounded())


async def use(switcher: ModelSwitcher, name: str, order: list[str] | None = None, for_s: float = 0.0) -> str:
    async with switcher.lend(name) as place:
        if order is not None:
            order.append(name)
        await asyncio.sleep(for_s)
        assert isinstance(place, Place)
        assert place.log.count(f"-{place.name}") < place.log.count(f"+{place.name}")  # it is still there
        return place.name


def test_a_model_is_loaded_once_for_many_requests() -> None:
    async def scenario() -> None:
        shelf = Shelf(0.01)
        switcher = ModelSwitcher(shelf.open, 5)
        assert await asyncio.gather(*(use(switcher, "a") for _ in range(20))) == ["a"] * 20
        assert shelf.log == ["+a"]

    run(scenario)


def test_the_old_model_leaves_before_the_new_one_comes_and_only_when_unused() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        switcher = ModelSwitcher(shelf.open, 5)
        first = asyncio.create_task(use(switcher, "a", for_s=0.05))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(use(switcher, "b"))
        await asyncio.sleep(0.01)
        assert shelf.log == ["+a"]
        assert await asyncio.gather(first, second) == ["a", "b"]
        assert shelf.log == ["+a", "-a", "+b"]

    run(scenario)


def test_a_stream_of_requests_for_one_model_does_not_starve_another() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        switcher, order = ModelSwitcher(shelf.open, 5), list[str]()
        running = asyncio.create_task(use(switcher, "a", order, 0.02))
        await asyncio.sleep(0.005)
        other = asyncio.create_task(use(switcher, "b", order))
        await asyncio.sleep(0)
        late = [asyncio.create_task(use(switcher, "a", order)) for _ in range(3)]
        await asyncio.gather(running, other, *late)
        assert order == ["a", "b", "a", "a", "a"]
        assert shelf.log == ["+a", "-a", "+b", "-b", "+a"]

    run(scenario)


def test_who_waits_too_long_is_told_so_and_leaves_no_trace() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        switcher = ModelSwitcher(shelf.open, 0.02)
        running = asyncio.create_task(use(switcher, "a", for_s=0.1))
        await asyncio.sleep(0.005)
        with pytest.raises(OverloadedError):
            await use(switcher, "b")
        assert await use(switcher, "a") == "a"  # nobody waits any more, so it may go on beside the running one
        await running
        assert shelf.log == ["+a"]

    run(scenario)


def test_a_model_that_cannot_be_loaded_fails_its_requests_only() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        shelf.broken.add("b")
        switcher = ModelSwitcher(shelf.open, 5)
        await use(switcher, "a")
        results = await asyncio.gather(use(switcher, "b"), use(switcher, "b"), use(switcher, "a"), return_exceptions=True)
        assert [type(result) for result in results] == [EngineError, EngineError, str]
        shelf.broken.clear()
        assert await use(switcher, "b") == "b"

    run(scenario)


def test_a_client_that_hangs_up_while_it_waits_does_not_keep_the_model() -> None:
    async def scenario() -> None:
        shelf = Shelf(0.02)
        switcher = ModelSwitcher(shelf.open, 5)
        gone = asyncio.create_task(use(switcher, "a"))
        await asyncio.sleep(0.005)
        gone.cancel()
        assert await use(switcher, "b") == "b"
        assert await use(switcher, "a") == "a"

    run(scenario)


def test_draining_refuses_those_who_wait_and_ends_what_is_loaded() -> None:
    async def scenario() -> None:
        shelf = Shelf()
        switcher = ModelSwitcher(shelf.open, 5)
        async with switcher.lend("a"):
            waiting = asyncio.create_task(use(switcher, "b"))
            await asyncio.sleep(0)
            await switcher.drain(1.0)
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineError):
            await use(switcher, "a")
        assert shelf.log == ["+a", "-a"]

    run(scenario)


def test_what_a_model_leaves_that_was_loaded_before_is_freed_though_it_was_exempt_from_collection() -> None:
    class Loop(Place):
        def __init__(self, name: str, log: list[str]) -> None:
            super().__init__(name, log)
            self.me = self  # as an application, whose routes refer to it

    async def scenario() -> None:
        async def open_loop(name: str) -> Loop:
            return Loop(name, [])

        switcher = ModelSwitcher(open_loop, 5, partial(freeze_gc_heap, thaw=True))
        await switcher.begin("a")
        assert switcher.shown is not None
        first = weakref.ref(switcher.shown)
        gc.collect()
        assert not any(found is first() for found in gc.get_objects())  # no collection looks at it
        async with switcher.lend("b"):
            pass
        assert first() is None
        assert gc.get_freeze_count() > 10_000

    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()
