"""Several engines of one model behind one client: a router chooses one for each request. If that one is lost, another one
continues the answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from cloister.cluster.health import ReplicaSpeeds
from cloister.cluster.replay import ReplayVerifier
from cloister.cluster.routers import Router
from cloister.engine.client import EngineClient, Health, RequestClient
from cloister.engine.in_flight import EventListener, InFlightRequest, RequestObserver, Sink
from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.engine.stacks import StackClusters, StackTrace, find_same
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import Ended, Event, Stepped
from cloister.types.request import AdapterInfo, ModelInfo, Request

DIFFERENT_MODELS: Final = "the replicas do not serve the same model and formats; start them with the same settings"

_logger = logging.getLogger(__name__)

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
        avoids_slow: slow replicas get no requests; False: they are only reported.
        verify_replay: share of finished requests that another replica computes again (`cluster.replay`).
        draw: chooses those.
    """

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        make_router: MakeRouter,
        *,
        avoids_slow: bool = True,
        verify_replay: float = 0.0,
        draw: random.Random | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.adapters = ReplicaAdapters(replicas)
        self._replicas = list(replicas)
        self._make_router = make_router
        self._router: Router | None = None
        self._places: dict[str, int] = {}
        self._listeners: list[EventListener] = []
        self._stacks = StackClusters()
        self._speeds = ReplicaSpeeds(len(replicas))
        self._avoids_slow = avoids_slow
        self._verifier = ReplayVerifier(self._replicas, verify_replay, draw or random.SystemRandom())
        self._clock = clock or WallClock()
        for index, replica in enumerate(self._replicas):
            replica.subscribe(self._observe)
            replica.subscribe(partial(self._note_speed, index))
            replica.rescue = partial(self._rescue, index)
            replica.diagnose = partial(self._diagnose, index)

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
        self.stop_replays()
        await asyncio.gather(*(replica.drain(timeout_s) for replica in self._replicas))

    def stop_replays(self) -> None:
        """Ends what is computed again at present."""
        self._verifier.stop()

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Of all replicas: `engine 0`, `engine 1` and so on."""
        return [(f"{name} {i}", pid) for i, replica in enumerate(self._replicas) for name, pid in replica.processes]

    def subscribe(self, listener: EventListener) -> None:
        """As `RequestClient.subscribe`; the load in an event of a step is that of all replicas together."""
        self._listeners.append(listener)

    def health(self) -> Health:
        """Good while one replica is; the detail names those that are not, and those that are slow."""
        each = [replica.health() for replica in self._replicas]
        bad = [f"replica {index}: {health.detail}" for index, health in enumerate(each) if not health.good]
        slow = [
            f"replica {index} takes {self._speeds.slowness(index):.1f} times as long as the others"
            for index in range(len(each))
            if self._speeds.is_slow(index)
        ]
        wrong = [f"replica {index} computed wrongly and gets no requests" for index in sorted(self._verifier.odd)]
        num_requests = sum(replica.num_requests for replica in self._replicas)
        detail = f"{len(each) - len(bad)} of {len(each)} replicas are well, {num_requests} requests in flight"
        return Health(len(bad) < len(each), "; ".join([detail, *bad, *slow, *wrong]))

    def fault(self) -> str | None:
        """Returns why no engine will be started again; None while one runs or will be."""
        faults = [replica.fault() for replica in self._replicas]
        return faults[0] if all(faults) else None

    @property
    def num_places(self) -> int:
        """Requests whose replica is known: those that have not ended."""
        return len(self._places)

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [self._describe(replica.snapshot(index)) for index, replica in enumerate(self._replicas)]

    def _describe(self, snapshot: ReplicaSnapshot) -> ReplicaSnapshot:
        """Adds to a snapshot what the comparison with other replicas showed."""
        index = snapshot.index
        return replace(
            snapshot,
            is_accepting=snapshot.is_accepting and index not in self._verifier.odd,
            slowness=self._speeds.slowness(index),
            is_slow=self._speeds.is_slow(index),
            num_mismatches=self._verifier.num_mismatches[index],
        )

    # Requests

    def submit(self, request: Request, sink: Sink, observer: RequestObserver | None = None) -> None:
        """Submits a request to the replica that the router picks. Raises as `RequestClient.submit`."""
        index = self._pick(request)
        if index is None:  # each of them refuses, and one says why
            right = [i for i in range(len(self._replicas)) if i not in self._verifier.odd]
            index = next((i for i in right if self._replicas[i].closed is None), right[0])
        self._replicas[index].submit(request, self._verifier.watch(request, index, sink), observer)
        self._places[request.request_id] = index

    def abandon(self, request_id: str) -> None:
        """Aborts a request at its replica."""
        self._verifier.forget(request_id)
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
        if self._avoids_slow:
            accepting = self._speeds.choose(accepting, self._clock.now())
        return accepting[0].index if self._router is None else self._router.pick(request, accepting)

    def _rescue(self, lost: int, found: InFlightRequest) -> bool:
        """Continues a request of a lost replica at another one; returns False if none accepts it."""
        self._speeds.forget(lost)
        if self._router is not None:
            self._router.forget(lost)
        if self._verifier.has_sent(found.request.request_id):
            return False  # it asks this replica, and waits for its next engine
        index = self._pick(found.request)
        if index is None:
            return False
        self._places[found.request.request_id] = index
        self._verifier.forget(found.request.request_id)
        self._replicas[index].adopt(found)
        return True

    async def _diagnose(self, hung: int, stack: StackTrace) -> None:
        """Logs where a replica hangs, and replaces those with it that make no step either and hang at the same place."""
        _logger.error("replica %d: %s", hung, self._stacks.add(stack, hung))
        others = [i for i, replica in enumerate(self._replicas) if i != hung and replica.is_stalled]
        stacks = await asyncio.gather(*(self._replicas[i].collect_stack() for i in others))
        for index in find_same(stack, dict(zip(others, stacks, strict=True))):
            if not self._replicas[index].is_stalled:
                continue  # it went on meanwhile
            _logger.error("replica %d hangs at the same place; it is replaced too", index)
            self._replicas[index].replace_engine()

    # Events

    def _note_speed(self, index: int, event: Event) -> None:
        """Logs when a replica becomes slow, and when it is well again."""
        if not isinstance(event, Stepped) or (change := self._speeds.note(index, event, self._clock.now())) is None:
            return
        if change.is_slow:
            what = "it gets no requests until it is well" if self._avoids_slow else "it still gets requests"
            _logger.warning("replica %d takes %.1f times as long as the others; %s", index, change.slowness, what)
        else:
            _logger.warning("replica %d is as fast as the others again", index)

    def _observe(self, event: Event) -> None:
        if isinstance(event, Stepped):
            event = self._total(event)
        elif self._verifier.owns(event):
            return
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
