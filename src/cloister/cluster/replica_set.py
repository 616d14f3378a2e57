"""Several engines of one model behind one client: a router chooses one for each request. If that one is lost, another one
continues the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from cloister.cluster.routers import Router
from cloister.engine.client import EngineClient, Health, RequestClient
from cloister.engine.in_flight import EventListener, InFlightRequest, RequestObserver, Sink
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import Ended, Event, Stepped
from cloister.types.request import AdapterInfo, ModelInfo, Request

DIFFERENT_MODELS: Final = "the replicas do not serve the same model and formats; start them with the same settings"

MakeRouter = Callable[[ModelInfo], Router]


class ReplicaAdapters:
    """The adapters of all replicas, which are the same (protocol `engine.adapters.AdapterManager`)."""

    def __init__(self, replicas: Sequence[EngineClient]) -> None:
        self._first, *self._others = replicas

    @property
    def loaded(self) -> Mapping[str, AdapterInfo]:
        """Those of the first replica, which loads an adapter last and unloads it first: the others have them too."""
        return self._first.adapters.loaded

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Loads an adapter into one replica after another; if one cannot load it, those before it unload it again."""
        done: list[EngineClient] = []
        for replica in (*self._others, self._first):
            try:
                adapter = await replica.adapters.load(name, path)
            except CloisterError:
                await asyncio.gather(*(earlier.adapters.unload(name) for earlier in done), return_exceptions=True)
                raise
            done.append(replica)
        return adapter

    async def unload(self, name: str) -> None:
        """Unloads an adapter from every replica."""
        await asyncio.gather(*(replica.adapters.unload(name) for replica in (self._first, *self._others)))


class ReplicaSet(RequestClient):
    """The client of several engines that serve one model, for one event loop.

    A request stays with its replica. If that is lost, another one that accepts requests continues it with the next token; if
    there is none, it waits until its own is restarted.

    Args:
        replicas: a client for each engine, all with the same settings; at least one.
        make_router: makes the router, once the model is known.
    """

    def __init__(self, replicas: Sequence[EngineClient], make_router: MakeRouter) -> None:
        self.adapters = ReplicaAdapters(replicas)
        self._replicas = list(replicas)
        self._make_router = make_router
        self._router: Router | None = None
        self._places: dict[str, int] = {}
        self._listeners: list[EventListener] = []
        for index, replica in enumerate(self._replicas):
            replica.subscribe(self._observe)
            replica.rescue = partial(self._rescue, index)

    async def start(self) -> None:
        """Starts all engines at once. If one cannot start, the others are stopped.

        Raises:
            CloisterError: as of the engine that cannot start, or they serve different models.
        """
        started = await asyncio.gather(*(replica.start() for replica in self._replicas), return_exceptions=True)
        error = next((result for result in started if isinstance(result, BaseException)), None)
        if error is None and len({replica.model.fingerprint for replica in self._replicas}) > 1:
            error = EngineError(DIFFERENT_MODELS)
        if error is not None:
            await self.drain(0.0)
            raise error
        first = self._replicas[0]
        self.model, self.startup = first.model, first.startup
        totals: dict[str, int] = {}
        for what, num_bytes in (item for replica in self._replicas for item in replica.memory):
            totals[what] = totals.get(what, 0) + num_bytes
        self.memory = list(totals.items())
        self._router = self._make_router(self.model)

    async def drain(self, timeout_s: float) -> None:
        """Drains all engines at once."""
        await asyncio.gather(*(replica.drain(timeout_s) for replica in self._replicas))

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Of all replicas: `engine 0`, `engine 1` and so on."""
        return [(f"{name} {i}", pid) for i, replica in enumerate(self._replicas) for name, pid in replica.processes]

    def subscribe(self, listener: EventListener) -> None:
        """As `RequestClient.subscribe`; the load in an event of a step is that of all replicas together."""
        self._listeners.append(listener)

    def health(self) -> Health:
        """Good while one replica is; the detail names those that are not."""
        each = [replica.health() for replica in self._replicas]
        bad = [f"replica {index}: {health.detail}" for index, health in enumerate(each) if not health.good]
        num_requests = sum(replica.num_requests for replica in self._replicas)
        detail = f"{len(each) - len(bad)} of {len(each)} replicas are well, {num_requests} requests in flight"
        return Health(len(bad) < len(each), "; ".join([detail, *bad]), is_idle=all(health.is_idle for health in each))

    def fault(self) -> str | None:
        """Returns why no engine will be started again; None while one runs or will be."""
        faults = [replica.fault() for replica in self._replicas]
        return faults[0] if all(faults) else None

    @property
    def num_places(self) -> int:
        """Requests whose replica is known: those that have not ended."""
        return len(self._places)

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [replica.snapshot(index) for index, replica in enumerate(self._replicas)]

    # Requests

    def submit(self, request: Request, sink: Sink, observer: RequestObserver | None = None) -> None:
        """Submits a request to the replica that the router picks. Raises as `RequestClient.submit`."""
        index = self._pick(request)
        if index is None:  # each of them refuses, and one says why
            running = [i for i, replica in enumerate(self._replicas) if replica.closed is None]
            index = running[0] if running else 0
        self._replicas[index].submit(request, sink, observer)
        self._places[request.request_id] = index

    def abandon(self, request_id: str) -> None:
        """Aborts a request at its replica."""
        if (index := self._places.get(request_id)) is not None:
            self._replicas[index].abandon(request_id)

    def give_up(self, request_id: str) -> None:
        """Ends a request in place of its replica."""
        if (index := self._places.get(request_id)) is not None:
            self._replicas[index].give_up(request_id)

    def _pick(self, request: Request) -> int | None:
        """Returns the replica for a request; None if none accepts one."""
        accepting = [snapshot for snapshot in self.snapshots() if snapshot.is_accepting]
        if not accepting:
            return None
        return accepting[0].index if self._router is None else self._router.pick(request, accepting)

    def _rescue(self, lost: int, found: InFlightRequest) -> bool:
        """Continues a request of a lost replica at another one; returns False if none accepts it."""
        if self._router is not None:
            self._router.forget(lost)
        index = self._pick(found.request)
        if index is None:
            return False
        self._places[found.request.request_id] = index
        self._replicas[index].adopt(found)
        return True

    # Events

    def _observe(self, event: Event) -> None:
        if isinstance(event, Stepped):
            event = self._total(event)
        elif isinstance(event, Ended) and event.last:
            self._places.pop(event.request_id, None)
        for listener in self._listeners:
            listener(event)

    def _total(self, event: Stepped) -> Stepped:
        """Returns a step with the load of all replicas."""
        steps = [replica.last_step for replica in self._replicas if replica.last_step is not None]
        return msgspec.structs.replace(
            event,
            num_running=sum(step.num_running for step in steps),
            num_waiting=sum(step.num_waiting for step in steps),
            num_used_blocks=sum(step.num_used_blocks for step in steps),
            num_cached_blocks=sum(step.num_cached_blocks for step in steps),
            num_total_blocks=sum(step.num_total_blocks for step in steps),
        )
