"""Several engines of one model behind one client: a router chooses one for each request. If that one is lost, another one
continues the answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from cloister.cluster.action_log import ActionLog
from cloister.cluster.health import ReplicaSpeeds
from cloister.cluster.hot_prefixes import HotPrefixes
from cloister.cluster.lengths import LengthCurves, LengthForecasts, LengthPredictor
from cloister.cluster.migration import LoadBalancer, Move
from cloister.cluster.prefix_copies import PrefixCopies
from cloister.cluster.prompt_followers import PromptFollowers
from cloister.cluster.replay import Answer, ReplayVerifier
from cloister.cluster.roles import RoleFlipper, RoleRouter, RoutingDecision
from cloister.cluster.rolling_update import EngineRelease, RollingUpdate
from cloister.cluster.routers import Router
from cloister.cluster.shadow_moves import ShadowEnd, ShadowMoves
from cloister.cluster.standby import StandbyKeeper, can_take_over
from cloister.engine.cache_reports import REPORT_TIMEOUT_S, CacheReport, add_up
from cloister.engine.client import DRAIN_REPLICA_S, EngineClient, Health, RequestClient
from cloister.engine.in_flight import EventListener, InFlightRequest, RequestObserver, Sink
from cloister.engine.replica_snapshot import (
    NOT_WELL,
    LengthErrors,
    ReplicaSnapshot,
    ReplicaState,
    RequestSnapshot,
    Role,
    StepCoefficients,
    UpdateProgress,
)
from cloister.engine.stacks import StackClusters, StackTrace, find_same
from cloister.scheduler.budget import StepCost, StepSize
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import CloisterError, EngineError, InvalidRequestError, QueueFullError
from cloister.types.events import Ended, Event, KVLoaded, KVStored, PrefixLeased, Scheduled, Stepped
from cloister.types.request import AdapterInfo, ModelInfo, Request
from cloister.types.scope import Scope

DIFFERENT_MODELS: Final = "the replicas do not serve the same model and formats; start them with the same settings"
ALL_DRAINED: Final = "every replica is being drained; send the request again later"
DEFAULT_BLOCK_SIZE: Final = 16
DRAIN_EVERY_S: Final = 0.05
REBALANCE_EVERY_S: Final = 0.5
STANDBY_EVERY_S: Final = 0.5
WAKE_TIMEOUT_S: Final = 10.0
"""Longest wait of a move for an engine that was idle; the request goes on where it is."""
COPY_TIMEOUT_S: Final = 5.0
"""Longest wait for KV; what did not arrive is computed."""
MAX_SHADOWS: Final = 16
"""How often a target begins anew with all tokens that there are, to catch up, before the source is stopped without it."""
TRANSFER_WEIGHT: Final = 0.1
"""Weight of the last transfer in the mean time for a token."""
TRANSFER_LIFETIME_S: Final = 30.0
"""Without a transfer for so long, its time counts as unknown: one that was slow, as under a fault, would stop all others, and
nothing would show that they are fast again."""

_logger = logging.getLogger(__name__)

MakeRouter = Callable[[ModelInfo], Router]
MakePredictor = Callable[[ModelInfo], LengthPredictor]
MakeHotPrefixes = Callable[[ModelInfo], HotPrefixes]


def make_length_curves(model: ModelInfo) -> LengthPredictor:
    return LengthCurves(model.max_model_len)


class ReplicaAdapters:
    """The adapters of all replicas, which are the same (protocol `engine.adapters.AdapterManager`).

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


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How replicas share the work.

    Attributes:
        roles: of each replica; empty if all are mixed.
        rebalance: running requests are moved from busy replicas to idle ones, and roles are flipped, as the load changes.
        num_standby: so many of the replicas, the last ones, get no requests until another one is lost.
    """

    roles: tuple[Role, ...] = ()
    rebalance: bool = False
    num_standby: int = 0


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
        config: ClusterConfig = ClusterConfig(),
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
        self.adapters = ReplicaAdapters(self._replicas)
        self._release, self._make_release = release, make_release
        self._wanted: str | None = None  # the weights of new requests, since replicas have had others too
        self._update: RollingUpdate | None = None
        self._make_router = make_router
        self._config = config
        self._block_size = block_size
        self._roles: list[Role] = list(config.roles) or ["mixed"] * len(self._replicas)
        self._router: RoleRouter | None = None
        self._make_predictor = make_predictor
        self._lengths: LengthForecasts | None = None
        self._make_hot_prefixes = make_hot_prefixes
        self._copies: PrefixCopies | None = None
        self._places: dict[str, int] = {}
        self._handing_off: list[set[str]] = [set() for _ in self._replicas]
        self._draining: set[int] = set()
        self._standby = set(range(len(self._replicas) - config.num_standby, len(self._replicas)))
        self._num_promotions = [0 for _ in self._replicas]
        self._moving: set[str] = set()
        self._shadow_moves = ShadowMoves(self._replicas, block_size, self._is_accepting, self._note_move)
        self._followers = PromptFollowers(self._replicas)
        self._step_waiters: list[list[asyncio.Future[None]]] = [[] for _ in self._replicas]
        self._loads: dict[tuple[int, str], asyncio.Future[KVLoaded]] = {}
        self._cost = StepCost()
        self._stored: dict[tuple[int, str], KVStored] = {}  # what each tier of each replica last said
        self._transfer_token_s = [0.0 for _ in self._replicas]
        self._transferred_s = [0.0 for _ in self._replicas]
        self._num_migrated = [0 for _ in self._replicas]
        self._num_routed_before = [0 for _ in self._replicas]
        self._num_kv_loads = [0 for _ in self._replicas]
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[EventListener] = []
        self._stacks = StackClusters()
        self._speeds = ReplicaSpeeds(len(replicas))
        self._avoids_slow = avoids_slow
        self._draw = draw or random.SystemRandom()
        self._keeper = StandbyKeeper(self._draw)
        self._verifier = ReplayVerifier(self._replicas, verify_replay, self._draw)
        self._clock = clock or WallClock()
        self._actions = ActionLog(self._clock)
        for index, replica in enumerate(self._replicas):
            self._connect(index, replica)

    def _connect(self, index: int, replica: EngineClient) -> None:
        """Hears of what a replica does from now on."""
        replica.number(index)
        replica.subscribe(partial(self._observe, index))
        replica.subscribe(partial(self._note_speed, index))
        replica.rescue = partial(self._rescue, index)
        replica.diagnose = partial(self._diagnose, index)
        replica.after_receive = partial(self._follow_up, index)
        replica.after_end = partial(self._forget, index)
        replica.on_prefix_leased = partial(self._note_leased, index)

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
        self.connect_routers()
        if self._config.rebalance:
            self._begin(self._rebalance(), "load levelling")
        if self._copies is not None:
            self._begin(self._copies.run(), "copies of prefixes")
        if self._standby:
            self._begin(self._keep_standby(), "standby")

    def connect_routers(self) -> None:
        """Makes the routers for `model`."""
        make = partial(self._make_router, self._replicas[0].model)
        self._router = RoleRouter(make(), make(), self._block_size)
        if self._router.predicts_lengths:
            self._lengths = LengthForecasts(self._make_predictor(self._replicas[0].model))
        if self._make_hot_prefixes is not None:
            controller = self._make_hot_prefixes(self._replicas[0].model)
            self._copies = PrefixCopies(self._replicas, controller, self._with_wanted_weights, self._note_copy, self._clock)

    async def drain(self, timeout_s: float) -> None:
        """Drains all engines at once."""
        for task in (tasks := set(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # an update ends the engine that it has started
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
        is_resting = all(health.is_idle or health.is_starting for health in each)
        is_starting = is_resting and any(health.is_starting for health in each)
        text = "; ".join([detail, *bad, *slow, *wrong])
        return Health(len(bad) < len(each), text, is_idle=is_resting and not is_starting, is_starting=is_starting)

    def fault(self) -> str | None:
        """Returns why no engine will be started again; None while one runs or will be."""
        faults = [replica.fault() for replica in self._replicas]
        return faults[0] if all(faults) else None

    @property
    def num_places(self) -> int:
        """Requests whose replica is known: those that have not ended."""
        return len(self._places)

    @property
    def num_shadows(self) -> int:
        """Requests that two engines compute, as they move."""
        return len(self._shadow_moves) + sum(replica.num_shadows for replica in self._replicas)

    @property
    def num_followed(self) -> int:
        """Prompts whose KV another replica loads while they are computed."""
        return len(self._followers)

    @property
    def num_forecasts(self) -> int:
        """Requests whose lengths are predicted: those that have not ended, if anything asks for it."""
        return 0 if self._lengths is None else len(self._lengths)

    @property
    def num_hot_prefixes(self) -> int:
        """Prefixes that replicas keep under a lease, because others have copies of them."""
        return 0 if self._copies is None else len(self._copies)

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [self._snapshot(index) for index in range(len(self._replicas))]

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
        return None if self._lengths is None else self._lengths.errors

    def _snapshot(self, index: int) -> ReplicaSnapshot:
        own = self._replicas[index].snapshot(index)
        requests = [] if self._lengths is None else self._replicas[index].request_snapshots()
        return replace(
            own,
            num_sequences=sum(request.num_sequences for request in requests),
            num_expected_tokens=0.0 if self._lengths is None else sum(map(self._lengths.remaining, requests)),
            state=self._state(index, own.state),
            is_accepting=own.is_accepting and index not in self._draining | self._verifier.odd | self._standby,
            is_standby=index in self._standby,
            slowness=self._speeds.slowness(index),
            is_slow=self._speeds.is_slow(index),
            num_mismatches=self._verifier.num_mismatches[index],
            num_routed=self._num_routed_before[index] + own.num_routed,
            num_migrated=self._num_migrated[index],
            num_kv_loads=self._num_kv_loads[index],
            num_prefix_copies=0 if self._copies is None else self._copies.num_copies[index],
            num_promotions=self._num_promotions[index],
            role=self._roles[index],
            cost=self._cost_of(index),
            transfer_token_s=self._transfer_time(index),
        )

    def _state(self, index: int, own: ReplicaState) -> ReplicaState:
        """Returns how a replica is, whose engine is `own`."""
        if own in ("lost", "starting"):
            return own
        if index in self._draining:
            return "draining" if self._replicas[index].num_requests else "drained"
        if own in ("draining", "stalled"):
            return own
        if index in self._verifier.odd:
            return "suspicious"
        if self._speeds.is_slow(index):
            return "slow"
        return "standby" if index in self._standby and own == "running" else own

    def _transfer_time(self, index: int) -> float:
        """Returns the mean seconds that KV of a token took to come to a replica; 0 if that is unknown, or was long ago."""
        is_known = self._clock.now() - self._transferred_s[index] < TRANSFER_LIFETIME_S
        return self._transfer_token_s[index] if is_known else 0.0

    def _cost_of(self, index: int) -> StepCoefficients:
        """Returns the step times of a replica: those of all, which have equal settings, and longer if it is clearly slower."""
        factor = self._speeds.correction(index, self._clock.now())
        per_step, per_token, per_attended, per_read = self._cost.coefficients
        return per_step * factor, per_token * factor, per_attended * factor, per_read * factor

    # Requests

    def submit(self, request: Request, sink: Sink, observer: RequestObserver | None = None) -> None:
        """Submits a request to the replica that the router picks. Raises as `RequestClient.submit`."""
        try:
            placement = self._place(request)
        except CloisterError:
            if observer is not None:
                observer.refuse()
            raise
        source = None if placement.source is None else self._replicas[placement.source].kv_endpoint
        self._replicas[placement.index].submit(
            request,
            self._verifier.watch(request, placement.index, sink),
            observer,
            prefill_only=placement.hands_off and self._moves_kv,
            source=source,
        )
        self._note_placement(request.request_id, placement)
        if self._lengths is not None:
            self._lengths.add(request)
        if self._copies is not None:
            self._copies.note(request, placement.index)

    def abort(self, request_id: str) -> None:
        """Aborts a request at its replica."""
        self._verifier.forget(request_id)
        self._shadow_moves.stop(request_id)
        self._followers.end(request_id)
        if (index := self._places.get(request_id)) is not None:
            self._replicas[index].abort(request_id)

    def expire(self, request_id: str) -> None:
        """Ends a request in place of its replica."""
        if (index := self._places.get(request_id)) is not None:
            self._replicas[index].expire(request_id)

    @property
    def _moves_kv(self) -> bool:
        return all(replica.exchanges_kv for replica in self._replicas)

    def _is_accepting(self, index: int) -> bool:
        return self._snapshot(index).is_accepting

    def _able(self, found: InFlightRequest | None = None, but: int | None = None) -> list[ReplicaSnapshot]:
        """Returns the replicas that a request may go to: those that have the weights of its answer if that has begun, else
        those that have the weights of new requests, or all if none of these accepts any."""
        if found is not None and found.is_begun:
            return self._accepting(but, found.stats.fingerprint)
        return (self._accepting(but, self._wanted) if self._wanted is not None else []) or self._accepting(but)

    def _accepting(self, but: int | None = None, weights: str | None = None) -> list[ReplicaSnapshot]:
        """Returns the replicas that requests may go to, without slow ones, and without idle ones that need not be started
        because another one of the same role runs and has no request.

        Args:
            weights: their fingerprint; None for any.
        """
        accepting = [
            snapshot
            for snapshot in self.snapshots()
            if snapshot.is_accepting and snapshot.index != but and weights in (None, self._replicas[snapshot.index].fingerprint)
        ]
        if accepting and self._avoids_slow:
            accepting = self._speeds.choose(accepting, self._clock.now())
        unused = {snapshot.role for snapshot in accepting if not (snapshot.is_idle or snapshot.num_requests)}
        return [snapshot for snapshot in accepting if not (snapshot.is_idle and snapshot.role in unused)]

    def _with_wanted_weights(self) -> list[ReplicaSnapshot]:
        """Returns the replicas that have the weights of new requests."""
        wanted = self._wanted or self._replicas[0].fingerprint
        return [each for each in self.snapshots() if self._replicas[each.index].fingerprint == wanted]

    def _note_leased(self, index: int, reply: PrefixLeased) -> None:
        if self._copies is not None:
            self._copies.take_reply(index, reply)

    def _note_copy(self, request: Request, index: int) -> None:
        if self._router is not None:
            self._router.note_copy(request, self._snapshot(index))

    def _place(self, request: Request) -> RoutingDecision:
        """Returns the place of a new request. If none accepts it, that of a replica that refuses it and says why."""
        accepting = self._able()
        if accepting and self._router is not None:
            return self._router.place(request, accepting)
        others = [i for i in range(len(self._replicas)) if i not in self._draining | self._verifier.odd | self._standby]
        running = [i for i in others if self._replicas[i].closed is None]
        if not others:
            raise EngineError(ALL_DRAINED)
        return RoutingDecision(running[0] if running else others[0])

    def _note_placement(self, request_id: str, placement: RoutingDecision) -> None:
        self._places[request_id] = placement.index
        if placement.hands_off:
            self._handing_off[placement.index].add(request_id)

    def _forget(self, index: int) -> None:
        """Forgets what the engine of a replica had cached, how fast it was, and its shadows: it has ended."""
        self._promote_standby()
        self._shadow_moves.lose(index)
        self._followers.lose(index)
        self._stored = {place: stored for place, stored in self._stored.items() if place[0] != index}
        self._speeds.forget(index)
        if self._router is not None:
            self._router.forget(index)
        if self._copies is not None:
            self._copies.lose(index)

    def _rescue(self, lost: int, found: InFlightRequest) -> bool:
        """Continues a request of a lost replica at another one; returns False if none accepts it."""
        if self._verifier.has_sent(found.request.request_id):
            return False  # it asks this replica, and waits for its next engine
        placement = self._find_place(found, self._able(found))
        if placement is None:
            return False
        self._shadow_moves.stop(found.request.request_id)
        self._followers.end(found.request.request_id)
        self._note_placement(found.request.request_id, placement)
        self._verifier.forget(found.request.request_id)
        self._replicas[placement.index].adopt(found)
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

    def _find_place(self, found: InFlightRequest, accepting: list[ReplicaSnapshot]) -> RoutingDecision | None:
        """Returns where an accepted request can go on; None if nowhere."""
        if self._router is None or not accepting:
            return None
        if found.has_output and (index := self._router.place_decode(found.request, accepting)) is not None:
            return RoutingDecision(index)
        try:
            return self._router.place(found.request, accepting)
        except QueueFullError:
            return None  # it was accepted earlier: it waits where it is

    # Moving requests

    async def migrate(self, request_id: str, target: int) -> bool:
        """Moves a request to another replica while it runs. Its client sees one answer without a gap.

        Where engines can load KV from each other, the target loads what there is. Then it computes the request too, while the
        source goes on; once it has said as much as the source, the source is told to stop. A target that stays behind begins
        anew when the source has just filled a block, which it can load: then it has least to compute. An idle target is
        started first. Returns False if the request has ended or moved meanwhile, is being moved, the target does not accept
        it, or has other weights than those with which the answer has begun.
        """
        source = self._places.get(request_id)
        if source is None or source == target or request_id in self._moving or not self._is_accepting(target):
            return False
        self._moving.add(request_id)
        try:
            return await self._move(request_id, source, target)
        finally:
            self._moving.discard(request_id)

    async def _move(self, request_id: str, source: int, target: int) -> bool:
        if not await self._replicas[target].wake(WAKE_TIMEOUT_S):
            return False
        has_copied = False
        for attempt in range(MAX_SHADOWS):
            if self._replicas[source].fingerprint != self._replicas[target].fingerprint:
                break  # there is no KV to load, and nothing that both would say
            has_copied = await self._copy_kv(request_id, source, target)
            if self._replicas[source].find(request_id) is not None:
                await self._wait_for_step(source)  # its next token comes as late as can be
            end = await self._shadow_moves.run(request_id, source, target)
            if end is ShadowEnd.TOOK_OVER:
                return True
            if end is ShadowEnd.FAILED or (end is ShadowEnd.FAR and attempt and not has_copied):
                break  # it computes what it could not load, once
            if has_copied and not await self._wait_for_block(request_id, source):
                break
        if self._places.get(request_id) != source or not self._is_accepting(target):
            return False
        return self._migrate(request_id, source, target, loads_kv=not has_copied)

    def _follow_up(self, index: int) -> None:
        """Does what a message of a replica makes possible."""
        self._hand_off(index)
        self._shadow_moves.advance(index)

    async def _copy_kv(self, request_id: str, source: int, target: int) -> bool:
        """Has the target load the KV of a running request. Returns whether it did."""
        endpoint = self._replicas[source].kv_endpoint
        found = self._replicas[source].find(request_id)
        if endpoint is None or self._replicas[target].kv_endpoint is None or found is None or not found.has_output:
            return False
        self._replicas[source].hold(request_id)
        loaded: asyncio.Future[KVLoaded] = asyncio.get_running_loop().create_future()
        self._loads[target, request_id] = loaded
        self._replicas[target].prefetch(found, endpoint)
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                return (await loaded).complete
        except TimeoutError:
            return False
        finally:
            self._loads.pop((target, request_id), None)

    async def _wait_for_block(self, request_id: str, source: int) -> bool:
        """Waits until a running request has just filled a KV block. Returns False if it has ended, or takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COPY_TIMEOUT_S):
                while (found := self._replicas[source].find(request_id)) is not None and found.has_output:
                    if self._num_past_block(found) <= 1:
                        return True
                    await self._wait_for_step(source)
        return False

    async def _wait_for_step(self, index: int) -> None:
        """Waits until a replica has made a step, for a time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._step_waiters[index].append(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COPY_TIMEOUT_S):
                await waiter

    def _num_past_block(self, found: InFlightRequest) -> int:
        """Returns how many tokens with KV a request has behind its last full block; its last token has none yet."""
        return (len(found.request.token_ids) + len(found.token_ids[0]) - 1) % self._block_size

    def _migrate(self, request_id: str, source: int, target: int, *, loads_kv: bool = True) -> bool:
        """Moves a request at once; returns False if it has ended."""
        self._shadow_moves.stop(request_id)
        waiting = self._replicas[source].find(request_id)
        if waiting is not None and waiting.is_begun and waiting.stats.fingerprint != self._replicas[target].fingerprint:
            return False
        found = self._replicas[source].detach_request(request_id)
        if found is None:
            return False
        self._note_move(request_id, source, target)
        endpoint = self._replicas[source].kv_endpoint if found.has_output and loads_kv else None
        self._replicas[target].adopt(found, endpoint)
        return True

    def _note_move(self, request_id: str, source: int, target: int) -> None:
        self._handing_off[source].discard(request_id)
        self._followers.end(request_id, target)
        self._places[request_id] = target
        self._num_migrated[target] += 1
        self._verifier.forget(request_id)

    def _hand_off(self, index: int) -> None:
        """Moves requests that have their first token from a replica that prefills to one that decodes."""
        for request_id in list(self._handing_off[index]):
            replica = self._replicas[index]
            found = replica.find(request_id)
            if found is None or self._places.get(request_id) != index:
                self._handing_off[index].discard(request_id)
            elif found.sink is None and found.is_prefilled:
                replica.discard_prefilled(request_id)
            elif found.sink is not None and found.has_output:
                self._place_decode(index, found)

    def _place_decode(self, index: int, found: InFlightRequest) -> None:
        request_id = found.request.request_id
        assert self._router is not None
        able, target = self._able(found, but=index), self._followers.find(request_id)
        if target is None or all(snapshot.index != target for snapshot in able):
            target = self._router.place_decode(found.request, able)
        if target is not None:
            self._migrate(request_id, index, target)
        elif found.is_prefilled:  # it goes on where it is
            self._replicas[index].detach_request(request_id)
            self._replicas[index].adopt(found)
            self._handing_off[index].discard(request_id)
            self._followers.end(request_id)

    def _follow_prompt(self, index: int, request_id: str) -> None:
        """Has the replica where a request will go on load the KV of its prompt, which is being computed."""
        found = self._replicas[index].find(request_id)
        if found is None or found.sink is None or found.has_output or self._router is None or not self._moves_kv:
            return
        target = self._router.place_decode(found.request, self._followers.count_in(self._able(found, but=index)))
        if target is not None:
            self._followers.begin(found, index, target)

    async def drain_replica(self, index: int, timeout_s: float = DRAIN_REPLICA_S) -> int:
        self._check_index(index)
        if len(self._draining | {index}) == len(self._replicas):
            raise InvalidRequestError("no other replica is left; return one of them first", param="replica")
        if index not in self._draining:
            self._actions.note_drain(index)
        self._draining.add(index)
        self._stand_in(index)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while index in self._draining:
            await asyncio.gather(*(self._move_away(request, index) for request in self._replicas[index].request_snapshots()))
            if not self._replicas[index].num_requests or asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(DRAIN_EVERY_S)
        return self._replicas[index].num_requests

    def check_drain(self, index: int) -> None:
        """As `RequestClient.check_drain`. A replica that is not well may go."""
        self._check_index(index)
        snapshots = self.snapshots()
        others = [snapshot for snapshot in snapshots if snapshot.index != index]
        is_last = len(self._draining | {index}) == len(self._replicas)  # `drain_replica` says so
        if not is_last and snapshots[index].state not in NOT_WELL and not any(map(can_take_over, others)):
            listed = ", ".join(
                f"replica {other.index} {'stands by and ' if other.is_standby else ''}is {other.state}" for other in others
            )
            raise InvalidRequestError(
                f"replica {index} is the last one that is well, so it cannot be drained: {listed}; return a drained one, or "
                "wait until another one is running (`cloister cluster status` shows it)",
                param="replica",
            )

    def return_replica(self, index: int) -> None:
        self._check_index(index)
        self._draining.discard(index)

    async def set_role(self, index: int, role: Role, timeout_s: float = DRAIN_REPLICA_S) -> None:
        """Changes the role of a replica, once it is drained. What is left after `timeout_s` ends there.

        Raises:
            InvalidRequestError: as `drain_replica`.
        """
        await self.drain_replica(index, timeout_s)
        self._roles[index] = role
        self._actions.note_flip(index, role)
        self.return_replica(index)

    async def _move_away(self, request: RequestSnapshot, index: int) -> None:
        found = self._replicas[index].find(request.request_id)
        placement = None if found is None else self._find_place(found, self._able(found, but=index))
        if placement is not None and await self.migrate(request.request_id, placement.index) and placement.hands_off:
            self._handing_off[placement.index].add(request.request_id)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self._replicas):
            raise InvalidRequestError(f"there is no such replica; they are 0 to {len(self._replicas) - 1}", param="replica")

    # Rolling update (`cluster.rolling_update.UpdatableReplicas`)

    def update_replicas(self, model: str | None = None) -> None:
        if self._make_release is None or self._release is None:
            raise InvalidRequestError("these replicas cannot be updated; start another server, and send requests there")
        if self._update is not None and self._update.progress.is_running:
            raise InvalidRequestError("an update is under way; `cloister cluster status` shows how far it is")
        release = self._make_release(self._release.model if model is None else model)
        self._update = RollingUpdate(self, release, None if model is None else self._release)
        self._actions.note_update()
        self.adapters.are_fixed = True
        self._begin(self._run_update(self._update, release), "rolling update")

    async def _run_update(self, update: RollingUpdate, release: EngineRelease) -> None:
        try:
            await update.run()
        finally:
            self.adapters.are_fixed = False
        if not update.progress.error:
            self._release = release

    @property
    def update_progress(self) -> UpdateProgress | None:
        return None if self._update is None else self._update.progress

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def adapter_setting(self) -> str | None:
        return self._replicas[0].adapters.as_setting(None)

    def is_drained(self, index: int) -> bool:
        return index in self._draining

    def num_lost(self, index: int) -> int:
        return self._replicas[index].num_lost

    def prefer_weights(self, model: ModelInfo) -> None:
        self.model, self._wanted = model, model.fingerprint

    async def compute_reference(self, request: Request) -> Answer | None:
        well = [snapshot for snapshot in self.snapshots() if snapshot.is_accepting and not snapshot.is_idle]
        for snapshot in sorted(well, key=lambda snapshot: snapshot.num_requests):
            request_id = f"trial-{secrets.token_hex(8)}"
            answer = await self._verifier.compute(msgspec.structs.replace(request, request_id=request_id), snapshot.index)
            if answer is not None:
                return answer
        return None

    def put_client(self, index: int, client: EngineClient) -> EngineClient:
        old, self._replicas[index] = self._replicas[index], client
        old.detach()
        # the count of a replica goes on: a counter that falls hides requests from a reader who comes now and then
        self._num_routed_before[index] += old.snapshot().num_routed - client.snapshot().num_routed
        self._connect(index, client)
        self._forget(index)
        self._verifier.odd.discard(index)
        return old

    # Levelling

    async def _rebalance(self) -> None:
        """Asks the controllers regularly, and does what they say; nothing while an update moves requests."""
        balancer, flips = LoadBalancer(self._draw), RoleFlipper(self._draw)
        while True:
            await asyncio.sleep(REBALANCE_EVERY_S)
            if self._update is not None and self._update.progress.is_running:
                continue
            now = asyncio.get_running_loop().time()
            replicas = self.snapshots()
            requests = {
                index: [request for request in replica.request_snapshots() if request.request_id in self._places]
                for index, replica in enumerate(self._replicas)
            }
            for move in balancer.decide([replica for replica in replicas if replica.is_accepting], requests, now):
                self._begin(self._perform(self._move_by_load(move)), "migration")
            self._actions.log_moves()
            if (flip := flips.decide(replicas, now)) is not None:
                self._begin(self._perform(self.set_role(flip.index, flip.role)), "flip")

    async def _move_by_load(self, move: Move) -> None:
        if await self.migrate(move.request_id, move.target):
            self._actions.note_move(move)

    async def _perform(self, action: Coroutine[None, None, object]) -> None:
        with contextlib.suppress(InvalidRequestError):  # an operator drains the others meanwhile
            await action

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_standby(self) -> None:
        """Looks for replicas that were lost while none that stood by was ready."""
        while True:
            await asyncio.sleep(STANDBY_EVERY_S)
            self._promote_standby()

    def _promote_standby(self) -> None:
        """Has replicas that stand by take the places of those that are gone."""
        if not self._standby:
            return
        for promotion in self._keeper.decide([each for each in self.snapshots() if each.index not in self._draining]):
            self._promote(promotion.index, promotion.lost)
            _logger.warning(
                "replica %d takes the place of replica %d, which stands by when it runs again", promotion.index, promotion.lost
            )

    def _promote(self, index: int, instead_of: int) -> None:
        self._standby.discard(index)
        self._standby.add(instead_of)
        self._roles[index], self._roles[instead_of] = self._roles[instead_of], self._roles[index]
        self._num_promotions[index] += 1

    def _stand_in(self, index: int) -> None:
        """Has one that stands by take the place of a replica that is drained, if no other one accepts requests."""
        if index in self._standby or any(snapshot.is_accepting for snapshot in self.snapshots()):
            return
        if (ready := self._keeper.choose(self.snapshots())) is not None:
            self._promote(ready, index)

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

    def _observe(self, index: int, event: Event) -> None:
        if isinstance(event, Stepped):
            if event.num_tokens and not event.drafting:
                elapsed_s = event.elapsed_s / self._speeds.correction(index)
                self._cost.learn(StepSize(event.num_tokens, event.num_attended), elapsed_s)
            waiters, self._step_waiters[index] = self._step_waiters[index], []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
            event = self._total(event, index)
        elif self._verifier.owns(event):
            return
        elif isinstance(event, Ended):
            if self._lengths is not None:
                self._lengths.end(event)
            if event.last:
                self._shadow_moves.stop(event.request_id)
                self._followers.end(event.request_id)
                self._places.pop(event.request_id, None)
                self._handing_off[index].discard(event.request_id)
        elif isinstance(event, KVLoaded) and not event.tier:
            self._note_load(index, event)
            if self._copies is not None and self._copies.owns(event):
                return
        elif isinstance(event, Scheduled) and event.request_id in self._handing_off[index]:
            self._follow_prompt(index, event.request_id)
        for listener in self._listeners:
            listener(event)

    def _note_load(self, index: int, event: KVLoaded) -> None:
        if event.num_bytes and event.num_tokens:
            self._num_kv_loads[index] += 1
            token_s = event.elapsed_s / event.num_tokens
            before_s = self._transfer_time(index) or token_s
            self._transfer_token_s[index] = before_s + TRANSFER_WEIGHT * (token_s - before_s)
            self._transferred_s[index] = self._clock.now()
        if (waiting := self._loads.get((index, event.request_id))) is not None and not waiting.done():
            waiting.set_result(event)

    def _total_stored(self, stored: KVStored) -> KVStored:
        same = [other for other in self._stored.values() if other.tier == stored.tier]
        ages = [other.oldest_s for other in same if other.oldest_s is not None]
        used_bytes = sum(other.used_bytes for other in same)
        return msgspec.structs.replace(stored, used_bytes=used_bytes, oldest_s=max(ages, default=None))

    def _total(self, event: Stepped, index: int) -> Stepped:
        """Returns a step with the load of all replicas, and with what the tiers of all of them hold."""
        if event.stored:
            self._stored |= {(index, stored.tier): stored for stored in event.stored}
            event = msgspec.structs.replace(event, stored=tuple(map(self._total_stored, event.stored)))
        steps = [replica.last_step for replica in self._replicas if replica.last_step is not None]
        return msgspec.structs.replace(
            event,
            num_running=sum(step.num_running for step in steps),
            num_waiting=sum(step.num_waiting for step in steps),
            num_used_blocks=sum(step.num_used_blocks for step in steps),
            num_cached_blocks=sum(step.num_cached_blocks for step in steps),
            num_total_blocks=sum(step.num_total_blocks for step in steps),
        )
