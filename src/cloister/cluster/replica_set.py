"""Several engines of one model behind one client: a router chooses one for each request. If that one is lost, another one
continues the answer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Final

from cloister.cluster.action_log import ActionLog
from cloister.cluster.controllers import LoadLevelling, StandbyPlaces
from cloister.cluster.hand_offs import HandOffs
from cloister.cluster.hot_prefixes import HotPrefixes
from cloister.cluster.lengths import LengthCurves, LengthForecasts, LengthPredictor
from cloister.cluster.prefix_copies import PrefixCopies
from cloister.cluster.replay import ReplayVerifier
from cloister.cluster.replica_adapters import ReplicaAdapters
from cloister.cluster.replica_drains import DRAIN_EVERY_S, ReplicaDrains
from cloister.cluster.replica_scaling import ReplicaScaling
from cloister.cluster.replica_states import ClusterConfig, ReplicaStates, ScalingConfig
from cloister.cluster.replica_updates import ReplicaUpdates
from cloister.cluster.request_moves import RequestMoves
from cloister.cluster.request_routing import MakeRouter, RequestRouting
from cloister.cluster.roles import RoutingDecision
from cloister.cluster.rolling_update import EngineRelease
from cloister.engine.cache_reports import REPORT_TIMEOUT_S, CacheReport, add_up
from cloister.engine.client import DRAINING, EngineClient
from cloister.engine.in_flight import EventListener, InFlightRequest, RequestObserver, Sink
from cloister.engine.replica_snapshot import LengthErrors, ReplicaSnapshot, Role, UpdateProgress
from cloister.engine.request_client import DRAIN_REPLICA_S, Health, RequestClient
from cloister.engine.stacks import StackClusters, StackTrace, find_same
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import CloisterError, EngineError, MemoryBudgetError
from cloister.types.events import Ended, Event, KVLoaded, PrefixLeased, Scheduled, Stepped
from cloister.types.request import ModelInfo, Request
from cloister.types.scope import Scope

DIFFERENT_MODELS: Final = (
    "the replicas do not compute the same: their model's files, versions of Cloister or instruction sets differ; give all "
    "machines the same files and version, and where processors differ a build for one set that all have, such as "
    "CLOISTER_ISA=avx2 (docs/cluster.md, Several machines)"
)
DEFAULT_BLOCK_SIZE: Final = 16
QUIET_LOOKS: Final = 2
"""Looks in a row that find no request before the engines are drained."""
ALL_MIXED: Final = ClusterConfig()

_logger = logging.getLogger(__name__)

MakePredictor = Callable[[ModelInfo], LengthPredictor]
MakeHotPrefixes = Callable[[ModelInfo], HotPrefixes]


def make_length_curves(model: ModelInfo) -> LengthPredictor:
    return LengthCurves(model.max_model_len)


class ReplicaSet(RequestClient):
    """The client of several engines that serve one model, for one event loop.

    A request stays with its replica unless it is moved: after its first token from one that prefills to one that decodes, and
    by `migrate`. If its replica is lost, another one that accepts requests continues it with the next token; if there is
    none, it waits until its own is restarted. While an update gives replicas other weights, an answer that has begun stays
    with replicas that have its weights (`cluster.rolling_update`).

    Args:
        replicas: a client for each engine, all with the same settings; at least one.
        make_router: makes a router, once the model is known: one for prompts and one for answers that go on elsewhere.
        block_size: tokens of a KV block of the engines.
        avoids_slow: slow replicas get no requests; False: they are only reported.
        verify_replay: share of finished requests that another replica computes again (`cluster.replay`).
        draw: chooses those, and whom `rebalance` moves where.
        make_predictor: makes a predictor of lengths, if the router asks for one.
        make_hot_prefixes: makes what decides which prefixes other replicas copy; None: they copy none.
        release: what `replicas` were made of; None if there can be no update.
        make_release: called for each rolling update with the setting `model`, returns what makes clients of new engines.
    """

    adapters: ReplicaAdapters

    def __init__(
        self,
        replicas: Sequence[EngineClient],
        make_router: MakeRouter,
        config: ClusterConfig = ALL_MIXED,
        block_size: int = DEFAULT_BLOCK_SIZE,
        *,
        avoids_slow: bool = True,
        verify_replay: float = 0.0,
        draw: random.Random | None = None,
        make_predictor: MakePredictor = make_length_curves,
        make_hot_prefixes: MakeHotPrefixes | None = None,
        release: EngineRelease | None = None,
        make_release: Callable[[str], EngineRelease] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._replicas = list(replicas)
        self._config = config
        self._make_predictor = make_predictor
        self._make_hot_prefixes = make_hot_prefixes
        self._copies: PrefixCopies | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[EventListener] = []
        self._is_draining = False
        self._stacks = StackClusters()
        self._draw = draw or random.SystemRandom()
        self._clock = clock or WallClock()
        self._actions = ActionLog(self._clock)
        self._verifier = ReplayVerifier(self._replicas, verify_replay, self._draw)
        self._states = ReplicaStates(self._replicas, config, self._verifier, self._clock, avoids_slow=avoids_slow)
        self.adapters = ReplicaAdapters(self._states.with_engines)
        self._routing = RequestRouting(self._states, make_router, block_size)
        self._moves = RequestMoves(self._states, block_size, self._note_move)
        self._hand_offs = HandOffs(self._states, self._routing, self._moves)
        self._standby = StandbyPlaces(self._states, self._draw)
        self._drains = ReplicaDrains(
            self._states, self._routing, self._moves, self._hand_offs, self._actions, self._standby.stand_in
        )
        self._updates = ReplicaUpdates(
            self._states,
            self._drains,
            self._verifier,
            self.adapters,
            self._actions,
            release,
            make_release,
            self._connect,
            self._forget,
            self._begin,
            self._draw,
        )
        self._scaling = self._make_scaling(config.scaling)
        for index, replica in enumerate(self._replicas):
            self._connect(index, replica)

    @property
    def model(self) -> ModelInfo:
        """That of new requests."""
        return self._states.model

    @model.setter
    def model(self, model: ModelInfo) -> None:
        self._states.model = model

    def _make_scaling(self, config: ScalingConfig | None) -> ReplicaScaling | None:
        if config is None:
            return None
        scaling = ReplicaScaling(
            self._states,
            self._drains,
            self._moves,
            self._hand_offs,
            self.adapters,
            self._actions,
            config,
            self._draw,
            self._begin,
            lambda: self._updates.is_running,
        )
        self._drains.add_first, self._updates.scaling = scaling.stand_in, scaling
        self.adapters.settle = scaling.settle
        return scaling

    def _connect(self, index: int, replica: EngineClient) -> None:
        """Hears of what a replica does from now on."""
        replica.number(index)
        replica.subscribe(partial(self._observe, index))
        replica.subscribe(partial(self._note_speed, index))
        replica.rescue = partial(self._rescue, index)
        replica.diagnose = partial(self._diagnose, index)
        replica.after_receive = partial(self._follow_up, index)
        replica.after_end = partial(self._forget, index)
        replica.adapters.is_used = self.uses_adapter
        replica.on_prefix_leased = partial(self._note_leased, index)

    async def start(self) -> None:
        """Starts all engines at once, or those that run at first. If one cannot start, the others are stopped.

        Raises:
            CloisterError: as of the engine that cannot start, or they serve different models.
        """
        replicas = self._states.with_engines()
        error = await _start_all(replicas, len(self._replicas))
        if error is None and len({replica.model.fingerprint for replica in replicas}) > 1:
            error = EngineError(DIFFERENT_MODELS)
        if error is not None:
            await self.drain(0.0)
            raise error
        first = replicas[0]
        self.model, self.startup = first.model, first.startup
        totals: dict[str, int] = {}
        stopped = [first] * len(self._states.stopped)  # each may run, with the share that the others have
        for what, num_bytes in (item for replica in (*replicas, *stopped) for item in replica.memory):
            totals[what] = totals.get(what, 0) + num_bytes
        self.memory = list(totals.items())
        for index in self._states.stopped:
            self._replicas[index].begin_resting(first.model)
        self.connect_routers()
        if self._scaling is not None:
            self._begin(self._scaling.run(), "scaling")
        if self._config.rebalance:
            levelling = LoadLevelling(
                self._states,
                self._moves,
                self._drains,
                self._actions,
                self._draw,
                self._begin,
                lambda: self._updates.is_running,
            )
            self._begin(levelling.run(), "load levelling")
        if self._copies is not None:
            self._begin(self._copies.run(), "copies of prefixes")
        if self._states.standby:
            self._begin(self._standby.run(), "standby")

    def connect_routers(self) -> None:
        """Makes the routers for `model`."""
        model = self._states.with_engines()[0].model
        self._routing.connect(model)
        if self._routing.predicts_lengths:
            self._states.lengths = LengthForecasts(self._make_predictor(model))
        if self._make_hot_prefixes is not None:
            controller = self._make_hot_prefixes(model)
            self._copies = self._states.copies = PrefixCopies(
                self._replicas, controller, self._states.with_wanted_weights, self._routing.note_copy, self._clock
            )

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, and lets the running ones end, which may go on in another engine meanwhile; then drains all
        engines at once, with what is left of the time."""
        self._is_draining = True
        ends_s = asyncio.get_running_loop().time() + timeout_s
        for task in (tasks := set(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # an update ends the engine that it has started
        self.stop_replays()
        num_quiet = 0  # a request of a worker is between two engines for a moment
        while num_quiet < QUIET_LOOKS and asyncio.get_running_loop().time() < ends_s:
            num_quiet = 0 if any(replica.is_busy for replica in self._replicas) else num_quiet + 1
            await asyncio.sleep(DRAIN_EVERY_S)
        left_s = max(0.0, ends_s - asyncio.get_running_loop().time())
        await asyncio.gather(*(replica.drain(left_s) for replica in self._replicas))

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
        by_index = {
            index: replica.health() for index, replica in enumerate(self._replicas) if index not in self._states.stopped
        }
        each = list(by_index.values())
        bad = [f"replica {index}: {health.detail}" for index, health in by_index.items() if not health.good]
        slow = [
            f"replica {index} takes {self._states.speeds.slowness(index):.1f} times as long as the others"
            for index in by_index
            if self._states.speeds.is_slow(index)
        ]
        wrong = [f"replica {index} computed wrongly and gets no requests" for index in sorted(self._verifier.odd)]
        num_requests = sum(replica.num_requests for replica in self._replicas)
        detail = f"{len(each) - len(bad)} of {len(each)} replicas are well, {num_requests} requests in flight"
        is_resting = all(health.is_idle or health.is_starting for health in each)
        is_starting = is_resting and any(health.is_starting for health in each)
        stopping = [DRAINING] if self._is_draining else []
        text = "; ".join([*stopping, detail, *bad, *slow, *wrong])
        return Health(
            len(bad) < len(each) and not stopping, text, is_idle=is_resting and not is_starting, is_starting=is_starting
        )

    def fault(self) -> str | None:
        """Returns why no engine will be started again; None while one runs or will be."""
        faults = [replica.fault() for replica in self._replicas]
        return faults[0] if all(faults) else None

    @property
    def num_places(self) -> int:
        """Requests whose replica is known: those that have not ended."""
        return len(self._moves.places)

    @property
    def num_shadows(self) -> int:
        """Requests that two engines compute, as they move."""
        return len(self._moves.shadows) + sum(replica.num_shadows for replica in self._replicas)

    @property
    def num_followed(self) -> int:
        """Prompts whose KV another replica loads while they are computed."""
        return len(self._hand_offs.followers)

    @property
    def num_forecasts(self) -> int:
        """Requests whose lengths are predicted: those that have not ended, if anything asks for it."""
        return 0 if self._states.lengths is None else len(self._states.lengths)

    @property
    def num_hot_prefixes(self) -> int:
        """Prefixes that replicas keep under a lease, because others have copies of them."""
        return 0 if self._copies is None else len(self._copies)

    def snapshots(self) -> list[ReplicaSnapshot]:
        return self._states.snapshots()

    async def inspect_cache(self, scope: Scope, *, drop: bool = False, timeout_s: float = REPORT_TIMEOUT_S) -> CacheReport:
        if drop and self._copies is not None:
            self._copies.forget(scope)
        each = await asyncio.gather(
            *(replica.inspect_cache(scope, drop=drop, timeout_s=timeout_s) for replica in self._replicas)
        )
        unanswered = [index for index, report in enumerate(each) if report.unanswered]
        return CacheReport(add_up(usage for report in each for usage in report.places), unanswered)

    def action_counts(self) -> Mapping[str, int]:
        return self._actions.counts

    def length_errors(self) -> LengthErrors | None:
        return None if self._states.lengths is None else self._states.lengths.errors

    # Requests

    def submit(self, request: Request, sink: Sink, observer: RequestObserver | None = None) -> None:
        """Submits a request to the replica that the router picks. Raises as `RequestClient.submit`."""
        try:
            if self._is_draining:
                raise EngineError(DRAINING)
            placement = self._routing.place(request)
        except CloisterError:
            if observer is not None:
                observer.refuse()
            raise
        source = None if placement.source is None else self._replicas[placement.source].kv_endpoint
        self._replicas[placement.index].submit(
            request,
            self._verifier.watch(request, placement.index, sink),
            observer,
            prefill_only=placement.hands_off and self._states.moves_kv,
            source=source,
        )
        self._note_placement(request.request_id, placement)
        if self._states.lengths is not None:
            self._states.lengths.add(request)
        if self._copies is not None:
            self._copies.note(request, placement.index)

    def abort(self, request_id: str) -> None:
        """Aborts a request at its replica."""
        self._verifier.forget(request_id)
        self._moves.shadows.stop(request_id)
        self._hand_offs.followers.end(request_id)
        if (index := self._moves.places.get(request_id)) is not None:
            self._replicas[index].abort(request_id)

    def expire(self, request_id: str) -> None:
        """Ends a request in place of its replica."""
        if (index := self._moves.places.get(request_id)) is not None:
            self._replicas[index].expire(request_id)

    def expire_held(self, request_id: str) -> None:
        if (index := self._moves.places.get(request_id)) is not None:
            self._replicas[index].expire_held(request_id)

    def _note_leased(self, index: int, reply: PrefixLeased) -> None:
        if self._copies is not None:
            self._copies.take_reply(index, reply)

    def _note_placement(self, request_id: str, placement: RoutingDecision) -> None:
        self._moves.places[request_id] = placement.index
        if placement.hands_off:
            self._hand_offs.add(request_id, placement.index)

    def _forget(self, index: int) -> None:
        """Forgets what the engine of a replica had cached, how fast it was, and its shadows: it has ended."""
        self._standby.promote()
        self._moves.shadows.lose(index)
        self._hand_offs.followers.lose(index)
        self._states.forget(index)
        self._routing.forget(index)
        if self._copies is not None:
            self._copies.lose(index)

    def _rescue(self, lost: int, found: InFlightRequest) -> bool:
        """Continues a request of a lost replica at another one; returns False if none accepts it."""
        request_id = found.request.request_id
        if self._verifier.has_sent(request_id):
            return False  # it asks this replica, and waits for its next engine
        placement = self._find_next(lost, found)
        if placement is None:
            return False
        self._moves.shadows.stop(request_id)
        self._hand_offs.followers.end(request_id)
        self._note_placement(request_id, placement)
        self._verifier.forget(request_id)
        self._replicas[placement.index].adopt(found)
        return True

    def _find_next(self, lost: int, found: InFlightRequest) -> RoutingDecision | None:
        """Returns where a request of a lost replica goes on; None if nowhere for now."""
        return self._routing.find_place(found)

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

    # Moving requests

    async def migrate(self, request_id: str, target: int) -> bool:
        """As `RequestMoves.migrate`."""
        return await self._moves.migrate(request_id, target)

    async def drain_replica(self, index: int, timeout_s: float = DRAIN_REPLICA_S) -> int:
        return await self._drains.drain(index, timeout_s)

    def check_drain(self, index: int) -> None:
        self._drains.check(index)

    def return_replica(self, index: int) -> None:
        self._drains.give_back(index)

    async def set_role(self, index: int, role: Role, timeout_s: float = DRAIN_REPLICA_S) -> None:
        """Changes the role of a replica, once it is drained. What is left after `timeout_s` ends there.

        Raises:
            InvalidRequestError: as `drain_replica`.
        """
        await self._drains.set_role(index, role, timeout_s)

    def update_replicas(self, model: str | None = None) -> None:
        self._begin(self._updates.run(self._updates.make(model)), "rolling update")

    @property
    def update_progress(self) -> UpdateProgress | None:
        return self._updates.progress

    def uses_adapter(self, digest: str) -> bool:
        """Whether an open request of any replica has this adapter."""
        return any(client.uses_adapter(digest) for client in self._states.clients)

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Events

    def _follow_up(self, index: int) -> None:
        """Does what a message of a replica makes possible."""
        self._hand_offs.advance(index)
        self._moves.shadows.advance(index)

    def _note_move(self, request_id: str, source: int, target: int) -> None:
        self._hand_offs.note_move(request_id, source, target)
        self._verifier.forget(request_id)

    def _note_speed(self, index: int, event: Event) -> None:
        """Logs when a replica becomes slow, and when it is well again."""
        if not isinstance(event, Stepped) or (change := self._states.speeds.note(index, event, self._clock.now())) is None:
            return
        if change.is_slow:
            what = "it gets no requests until it is well" if self._states.avoids_slow else "it still gets requests"
            _logger.warning("replica %d takes %.1f times as long as the others; %s", index, change.slowness, what)
        else:
            _logger.warning("replica %d is as fast as the others again", index)

    def _observe(self, index: int, event: Event) -> None:
        if isinstance(event, Stepped):
            event = self._states.note_step(index, event)
            self._moves.note_step(index)
        elif self._verifier.owns(event):
            return
        elif isinstance(event, Ended):
            if self._states.lengths is not None:
                self._states.lengths.end(event)
            if event.last:
                self._moves.shadows.stop(event.request_id)
                self._moves.places.pop(event.request_id, None)
                self._hand_offs.end(event.request_id, index)
        elif isinstance(event, KVLoaded) and not event.tier:
            self._states.note_load(index, event)
            self._moves.note_load(index, event)
            if self._copies is not None and self._copies.owns(event):
                return
        elif isinstance(event, Scheduled):
            self._hand_offs.note_scheduled(index, event.request_id)
        for listener in self._listeners:
            listener(event)


async def _start_all(replicas: Sequence[EngineClient], num_sharing: int) -> BaseException | None:
    """Starts all at once. If one cannot start, the others are given up, and its error is returned.

    Args:
        num_sharing: replicas that share the memory, with those that do not run at first.
    """
    starting = [asyncio.create_task(replica.start()) for replica in replicas]
    try:
        done, _ = await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in starting:
            task.cancel()
    await asyncio.gather(*starting, return_exceptions=True)
    error = next((task.exception() for task in done if task.exception() is not None), None)
    if isinstance(error, MemoryBudgetError) and num_sharing > 1:
        return _advise(error, num_sharing)
    return error


def _advise(error: MemoryBudgetError, num_sharing: int) -> MemoryBudgetError:
    """Returns the error of one of so many replicas that share the memory, with how many of them would fit, if that is known."""
    if error.fit is None:
        return MemoryBudgetError(f"{error.message}; or start fewer replicas: {num_sharing} share the memory", param=error.param)
    if not (num_fitting := int(error.fit * num_sharing)):
        return error
    # Without the engine's advice to raise its share, which follows from their number.
    problem = error.message.partition("; ")[0]
    advice = f"start {num_fitting} replicas at most, since {num_sharing} share the memory"
    return MemoryBudgetError(f"{advice}: of each, {problem}", param=error.param)
