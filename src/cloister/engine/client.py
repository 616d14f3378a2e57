"""The front's client of an engine, for every transport: submits requests, returns outputs, and ends every request
exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from cloister.engine.adapters import AdapterCalls
from cloister.engine.cache_reports import REPORT_TIMEOUT_S, CacheReport
from cloister.engine.calls import EngineCalls
from cloister.engine.in_flight import (
    NO_ANSWER,
    EventListener,
    InFlightRequest,
    InFlightRequests,
    RequestObserver,
    Sink,
)
from cloister.engine.poison_requests import TRIAL_SPREAD_S
from cloister.engine.replica_snapshot import (
    ReplicaSnapshot,
    ReplicaState,
    RequestSnapshot,
)
from cloister.engine.request_client import Health, RequestClient
from cloister.engine.shadow import Shadow
from cloister.engine.stacks import StackClusters, StackTrace, read_step_stack
from cloister.engine.supervision import IdleTimer, LivenessProbe, Supervision, Watchdog
from cloister.engine.transports import SealedWorkerTransport, StackSource, Transport
from cloister.types.clock import Clock, WallClock
from cloister.types.config import EngineConfig
from cloister.types.errors import CloisterError, EngineError
from cloister.types.events import (
    ABORTED,
    Abort,
    CacheReply,
    CancelPrefetch,
    FrontMessage,
    HoldKV,
    InspectCache,
    KVSource,
    LeasePrefix,
    Outputs,
    Ping,
    PrefetchKV,
    PrefixLeased,
    Ready,
    RenewPrefix,
    Shutdown,
    Stepped,
    Submit,
)
from cloister.types.logs import describe
from cloister.types.request import FinishReason, ModelInfo, Request
from cloister.types.scope import Scope

NOT_STARTED: Final = "the engine has not been started"
DRAINING: Final = "the server is shutting down; send the request again to another one, or later"
RESTARTING: Final = "the engine is being restarted; send the request again in a few seconds"
UNSTARTABLE: Final = "the engine ended and cannot be started again; the log says why"
BROKEN: Final = "the engine died too often and is no longer restarted; the log says why it died"
STOP_GRACE_S: Final = 5.0
"""Time after the drain's deadline within which the engine must exit by itself."""
HOLD_KV_S: Final = 15.0
"""How long an engine keeps the KV of a request that continues in another engine, which may load it."""

_REST_POLL_S: Final = 0.02

_logger = logging.getLogger(__name__)


class EngineClient(RequestClient):
    """The client of an engine for one event loop.

    Args:
        transport: the connection to the engine.
        config: the engine's settings; `max_waiting` and `max_num_seqs` also bound the queue here; `stall_timeout_s` the time
            without a step after which the engine is unhealthy (after twice that time it is replaced, if possible).
        draw: draws the time at which to try a request that may have killed an engine; None: the system's random numbers.

    Attributes:
        name: of its engine, in the log.
        num_lost: engines that ended without being told to.
        num_restarts: engines that were started in place of one that had died or hung.
        adapters: as above; of one engine.
        closed: why no request is accepted at present, or None.
        diagnose: called with the stack of an engine that hangs, before it is killed. None logs it.
        rescue: called with each request of an engine that has ended, if it can be resumed and need not be tried alone; returns
            whether another client has adopted it. Requests that are not adopted wait for this client's next engine. None if
            there is no other client.
        exchanges_kv: whether its engines give KV to other engines, and load theirs.
        kv_endpoint: where other engines load KV of its engine from; None if they cannot, or none runs.
        after_receive: called after each message of the engine was handled; None if nobody wants to know.
        after_failure: called when an engine has ended, or has not started, before `rescue`. None if nobody wants to know.
        after_end: called when an engine has ended, before `rescue`: what it had cached is gone. None if nobody wants to know.
        on_prefix_leased: called when its engine has leased a prefix, or such a lease has ended. None if nobody wants to know.
    """

    adapters: AdapterCalls

    def __init__(
        self, transport: Transport, config: EngineConfig, *, clock: Clock | None = None, draw: random.Random | None = None
    ) -> None:
        self.closed: str | None = NOT_STARTED
        self.name = "the engine"
        self.num_lost = 0
        self.num_restarts = 0
        self.rescue: Callable[[InFlightRequest], bool] | None = None
        self.exchanges_kv = False
        self.kv_endpoint: str | None = None
        self.after_receive: Callable[[], None] | None = None
        self.after_failure: Callable[[], None] | None = None
        self.after_end: Callable[[], None] | None = None
        self.on_prefix_leased: Callable[[PrefixLeased], None] | None = None
        self.diagnose: Callable[[StackTrace], Awaitable[None]] | None = None
        self._stacks = StackClusters()
        self._cache_calls: EngineCalls[CacheReply] = EngineCalls(self._call)
        self._transport = transport
        self._config = config
        self._clock = clock or WallClock()
        self.adapters = AdapterCalls(self._call, self.uses_adapter, are_fixed=not config.runtime_adapters, clock=self._clock)
        self._draw = draw or random.SystemRandom()
        self._num_routed = 0
        self._requests = InFlightRequests(self._clock, max_waiting=config.max_waiting, max_num_seqs=config.max_num_seqs)
        self._supervision = transport.supervision or Supervision(restarts=None)
        self._watches = transport.supervision is not None and self._supervision.watches
        self._replaces = self._watches and self._supervision.restarts is not None
        self._watchdog = Watchdog(config.stall_timeout_s, self._supervision.first_step_timeout_s)
        self._idle = IdleTimer(self._supervision.idle_timeout_s)
        self._probe = LivenessProbe(self._supervision.ping_after_s)
        self._is_resting = False
        self._wanted = asyncio.Event()
        self._has_woken = asyncio.Event()
        self._has_rested = asyncio.Event()
        self._held_calls: list[FrontMessage] = []
        self._lifecycle: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_draining = False
        self._is_given_up = False
        self._fault: str | None = None
        self._why_broken = BROKEN
        self._trial: asyncio.TimerHandle | None = None
        if transport.ready is not None:
            self._introduce(transport.ready)

    async def start(self) -> None:
        if not self._supervision.watches:
            self._await_request()
            return
        try:
            await self._open()
        except BaseException:
            await self._transport.discard_template(is_final=True)
            raise
        self._lifecycle = asyncio.create_task(self._serve_until_broken(), name="engine lifecycle")

    def begin_resting(self, model: ModelInfo) -> None:
        """Begins without an engine, in place of `start`: a request, or `wake`, starts one.

        Args:
            model: the model that this engine must have.
        """
        self.model, self.memory, self.startup = model, [], []
        self._requests.fingerprint = model.fingerprint
        self._await_request()

    def _await_request(self) -> None:
        self._is_resting, self.closed = True, None
        self._lifecycle = asyncio.create_task(self._serve_until_broken(), name="engine lifecycle")

    @property
    def pid(self) -> int | None:
        """The process id of the engine, if it runs in its own process."""
        return self._transport.pid

    @property
    def fingerprint(self) -> str:
        """Fingerprint of its engine's weights; empty before the first engine."""
        return self._requests.fingerprint or ""

    @property
    def processes(self) -> list[tuple[str, int]]:
        return [] if self.pid is None else [("engine", self.pid)]

    @property
    def last_step(self) -> Stepped | None:
        """The last step of its engine."""
        return self._requests.last_step

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def is_busy(self) -> bool:
        """Whether requests are open, those of workers with their own channels included."""
        return self._requests.is_waited_for

    @property
    def num_leaving(self) -> int:
        """Requests that other engines have, and whose end here its engine has not reported yet."""
        return self._requests.num_leaving

    def number(self, index: int) -> None:
        """Names the engine in logs as that of one of several replicas."""
        self.name, self._requests.replica = f"the engine of replica {index}", index

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait and the engine makes no step."""
        return self._is_open and self._watchdog.is_stalled

    @property
    def state(self) -> ReplicaState:
        """How its engine is."""
        if self._fault is not None:
            return "lost"
        if self._is_draining:
            return "draining"
        if self.closed is not None or (self._is_resting and self._wanted.is_set()):
            return "starting"
        if self._is_resting:
            return "idle"
        return "stalled" if self._watchdog.is_stalled else "running"

    def snapshot(self, index: int = 0) -> ReplicaSnapshot:
        """Returns the load of its engine, as the replica of this index."""
        step, held = self._requests.last_step, self._requests.held_searches
        return ReplicaSnapshot(
            index=index,
            is_accepting=self.closed is None and not self._requests.holds_back and self._requests.has_room(),
            is_idle=self._is_resting and self._supervision.watches,  # else it need not be started
            state=self.state,
            num_requests=len(self._requests),
            num_waiting=self._requests.num_waiting,
            num_held=len(held),
            num_held_tokens=sum(len(found.request.token_ids) for found in held),
            num_queued=0 if step is None else step.num_queued,
            num_pending_tokens=self._requests.num_pending_tokens,
            num_slots=self._config.max_num_seqs if step is None or not step.num_queued else max(1, step.num_running),
            num_used_blocks=0 if step is None else step.num_used_blocks,
            num_total_blocks=0 if step is None else step.num_total_blocks,
            num_routed=self._num_routed,
            num_restarts=self.num_restarts,
            pid=self.pid,
        )

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [self.snapshot()]

    def has_room_for(self, tenant: str) -> bool:
        """Whether a tenant has not used up its share of the queue."""
        return self._requests.has_room_for(tenant)

    async def inspect_cache(self, scope: Scope, *, drop: bool = False, timeout_s: float = REPORT_TIMEOUT_S) -> CacheReport:
        if self._is_resting and not self._wanted.is_set():
            return CacheReport([], [])  # what an idle engine had ended with it
        try:
            reply = await self._cache_calls.call(lambda call_id: InspectCache(call_id, scope, drop), timeout_s)
        except (TimeoutError, EngineError):
            return CacheReport([], [0])
        return CacheReport(reply.places, [])

    def subscribe(self, listener: EventListener) -> None:
        self._requests.subscribe(listener)

    def health(self) -> Health:
        if self.closed is not None:
            return Health(False, self.closed)
        if self._is_resting and self._wanted.is_set():
            return Health(True, f"the engine starts, {len(self._requests)} requests wait for it", is_starting=True)
        if self._is_resting:
            return Health(True, "idle: the engine has ended, and the next request starts another", is_idle=True)
        detail = f"{len(self._requests)} requests in flight, {self._requests.num_waiting} of them waiting"
        if self._watchdog.is_stalled:
            return Health(False, f"no step for {self._watchdog.stalled_s:.0f} s; {detail}")
        return Health(True, detail)

    def fault(self) -> str | None:
        return self._fault

    # Requests

    def submit(
        self,
        request: Request,
        sink: Sink,
        observer: RequestObserver | None = None,
        *,
        prefill_only: bool = False,
        source: str | None = None,
    ) -> None:
        """As `RequestClient.submit`.

        Args:
            prefill_only: the engine computes the first token only; the caller releases the request then.
            source: endpoint of an engine that has KV of the prompt.
        """
        try:
            if self.closed is not None:
                raise EngineError(self.closed)
            self._requests.check(request)
            # drawn here, so that another engine can continue the answer with the same noise
            seed = secrets.randbits(63) if request.sampling.seed is None else None
            hold_s = HOLD_KV_S if prefill_only else 0.0
            is_sent = self._is_open and not self._requests.holds_back
            if is_sent:
                self._send(
                    Submit(
                        request,
                        seed,
                        kv_source=None if source is None else KVSource(source),
                        hold_kv_s=hold_s,
                        prefill_only=prefill_only,
                    )
                )
        except Exception:
            if observer is not None:
                observer.refuse()
            raise
        self._requests.add(request, sink, observer, seed=seed, is_held=not is_sent, source=source, prefill_hold_s=hold_s)
        self._num_routed += 1
        self._want()

    def abort(self, request_id: str) -> None:
        if self._requests.leave(request_id):
            self._send(Abort(request_id))
        self._send_due()

    def expire(self, request_id: str) -> None:
        if self._requests.end(request_id, FinishReason.TIMEOUT, NO_ANSWER):
            self._send(Abort(request_id))
        self._send_due()

    def expire_held(self, request_id: str) -> None:
        if self._requests.is_held(request_id):
            self._requests.end(request_id, FinishReason.TIMEOUT, NO_ANSWER)

    def find(self, request_id: str) -> InFlightRequest | None:
        """Returns a request that has not ended."""
        return self._requests.find(request_id)

    def request_snapshots(self) -> list[RequestSnapshot]:
        """Returns the progress of every request that something waits for, in the order of their arrival."""
        return self._requests.snapshots()

    def detach_request(self, request_id: str, *, keeps_kv: bool = True) -> InFlightRequest | None:
        """Aborts a request here without telling its waiter: another client adopts what it returns. None if it has ended.

        Args:
            keeps_kv: for an engine that loads it; False: that has computed or loaded all, and others need the blocks.
        """
        found = self._requests.depart(request_id, is_running=self._is_open)
        if found is not None and not found.is_prefilled:
            if keeps_kv:
                self.hold(request_id)
            self._send(Abort(request_id))
        if found is not None and keeps_kv and self.kv_endpoint is not None:
            self._idle.note_use(self._clock.now() + HOLD_KV_S)  # the other engine may load its KV for this long
        self._send_due()
        return found

    def discard_prefilled(self, request_id: str) -> None:
        """Ends a request that its engine has left (`InFlightRequest.is_prefilled`) and nothing waits for."""
        self._requests.end(request_id, FinishReason.ABORT, ABORTED)

    def prefetch(self, found: InFlightRequest, source: str, *, follows: bool = False) -> None:
        """Has the engine load KV of a request that another engine runs, from the endpoint `source`; `KVLoaded` says when.

        Args:
            follows: that engine computes its prompt, which is loaded as it is done.
        """
        token_ids = [*found.request.token_ids, *found.token_ids[0]]
        message = PrefetchKV(found.request, token_ids, KVSource(source), follows)
        if self._is_resting:
            self._held_calls.append(message)
        self._want()
        self._send(message)

    def cancel_prefetch(self, request_id: str) -> None:
        """Cancels a `prefetch` whose request does not come."""
        held = [call for call in self._held_calls if isinstance(call, PrefetchKV) and call.request.request_id == request_id]
        for call in held:
            self._held_calls.remove(call)
        self._send(CancelPrefetch(request_id))

    def lease_prefix(self, request: Request, lease_s: float, source: str | None = None) -> None:
        """Has the engine lease the prefix of a request, or load a copy from the endpoint `source`; `on_prefix_leased` says when
        it has, and when that lease has ended (`types.events.LeasePrefix`)."""
        where = None if source is None else KVSource(source)
        self._send(LeasePrefix(request.request_id, request, lease_s, where))

    def renew_prefix(self, name: str, lease_s: float) -> None:
        """Extends a lease of a prefix to this time from now; 0: ends it."""
        self._send(RenewPrefix(name, lease_s))

    def hold(self, request_id: str) -> None:
        """Has the engine keep the KV that a request has so far, until another engine has loaded it."""
        if self.kv_endpoint is not None:
            self._send(HoldKV(request_id, HOLD_KV_S))

    def adopt(self, found: InFlightRequest, source: str | None = None) -> None:
        """Takes over a request that another client released or whose engine was lost, with its output from there.

        Args:
            source: endpoint of an engine that has its KV.
        """
        self.drop_shadow(found.request.request_id)
        self._requests.adopt(found, source)
        self._num_routed += 1
        self._want()
        self._send_due()
        self._requests.end_overdue()  # `expire_held` was called before it came

    @property
    def num_shadows(self) -> int:
        """Requests of other clients that its engine computes too."""
        return self._requests.num_shadows

    def add_shadow(self, found: InFlightRequest) -> Shadow | None:
        """Has the engine continue a request of another client, whose own engine continues it too. Returns the shadow, whose
        output reaches nobody before `take_over`; None if that is impossible now."""
        if not self._is_open or self.closed is not None or self._requests.holds_back:
            return None
        shadow = self._requests.add_shadow(found)
        if shadow is not None:
            self._want()
            self._send(found.submission(self._clock.now()))
        return shadow

    def drop_shadow(self, request_id: str) -> None:
        """Ends a shadow, if there is one."""
        if self._requests.drop_shadow(request_id):
            self._send(Abort(request_id))

    def take_over(self, request_id: str) -> None:
        """Continues a request whose shadow is here and which its own client has released."""
        self._num_routed += 1
        self._requests.take_over(request_id)

    def give_up(self) -> None:
        """Starts no further engine when this one has ended or does not start: other replicas continue its requests."""
        self._is_given_up = True

    def detach(self) -> None:
        """Stops all notifications: another client has its place."""
        self.rescue = self.diagnose = self.after_receive = self.after_failure = self.after_end = self.on_prefix_leased = None
        self._requests.unsubscribe_all()

    # Messages

    def receive(self, message: Outputs) -> None:
        """Handles a message of the engine."""
        self._watchdog.note(message.events)
        self._probe.note(self._clock.now())
        self._requests.deliver(message)
        if self._requests.holds_back:
            self._send_due()
        for reply in message.replies:
            if isinstance(reply, CacheReply):
                self._cache_calls.deliver(reply.call_id, reply)
            elif isinstance(reply, PrefixLeased):
                if self.on_prefix_leased is not None:
                    self.on_prefix_leased(reply)
            else:
                self.adapters.deliver(reply)
        if self.after_receive is not None:
            self.after_receive()

    def _send(self, message: FrontMessage) -> None:
        if self._is_open:
            self._transport.send(message)

    def _send_due(self) -> None:
        """Hands over requests that were held, if the engine can have them now."""
        if self._replaces or not self._requests.awaits_trial:
            self._hand_over()
        elif self._trial is None:  # other clients of the engine try theirs at other times
            delay_s = self._draw.uniform(0.0, TRIAL_SPREAD_S)
            self._trial = asyncio.get_running_loop().call_later(delay_s, self._begin_trial)

    def _begin_trial(self) -> None:
        self._trial = None
        self._hand_over()

    def _hand_over(self) -> None:
        if self._is_open:
            for message in self._requests.take_due():
                self._transport.send(message)

    def uses_adapter(self, digest: str) -> bool:
        """Whether an open request has this adapter."""
        return self._requests.uses_adapter(digest)

    def _call(self, message: FrontMessage) -> None:
        if self.closed is not None:
            raise EngineError(self.closed)
        if self._is_resting:
            self._held_calls.append(message)
        self._want()
        self._send(message)

    def _want(self) -> None:
        """Keeps the engine from becoming idle, and wakes an idle one."""
        self._idle.note_use(self._clock.now())
        self._wanted.set()

    async def wake(self, timeout_s: float) -> bool:
        """Starts an idle engine, and keeps one that runs from becoming idle. Returns whether one runs, within `timeout_s`."""
        self._want()
        if self._is_resting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_woken.wait(), timeout_s)
        return self._is_open

    async def rest(self) -> bool:
        """Ends an engine without requests, and waits until it has ended; a request or `wake` starts another one.

        Returns False if it has requests, or is not one that can be started again. What has left it may take its KV along
        first.
        """
        if self._is_resting:
            return not self._wanted.is_set()
        ends_s = self._clock.now() + HOLD_KV_S + STOP_GRACE_S
        while self._is_open and self._clock.now() < ends_s:
            if not (self._requests.is_waited_for or self.adapters.is_loading or self._idle.is_held(self._clock.now())):
                break
            await asyncio.sleep(_REST_POLL_S)
        is_needed = self._requests.is_waited_for or self.adapters.is_changing
        if not self._is_open or is_needed or self._supervision.restarts is None:
            return False
        await self._end_idle_engine()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_rested.wait(), STOP_GRACE_S)
        return self._has_rested.is_set() and self._is_resting and not self._wanted.is_set()  # else the next one starts

    # The engine's life

    async def drain(self, timeout_s: float) -> None:
        self.closed, self._is_draining = DRAINING, True
        if self._lifecycle is None:
            return
        if not self._is_open:
            self._lifecycle.cancel()  # it is waiting to restart the engine
        self._send(Shutdown(timeout_s))
        await asyncio.wait({self._lifecycle}, timeout=timeout_s + STOP_GRACE_S)
        self._lifecycle.cancel()
        await asyncio.wait({self._lifecycle}, timeout=STOP_GRACE_S)
        self._requests.end_all(DRAINING)

    async def _open(self) -> None:
        config = replace(self._config, lora=self.adapters.as_setting(self._config.lora))
        await self._transport.open(config)
        ready = self._transport.ready
        assert ready is not None
        before = self._requests.fingerprint
        if before not in (None, ready.model.fingerprint):
            self._transport.kill()
            await self._transport.close()
            raise EngineError(
                f"it started again with other weights or formats ({ready.model.fingerprint}, not {before}), with which "
                "answers must not continue. Put the files of the model back, or restart the server"
            )
        self._introduce(ready)
        self._watchdog.restart(self._clock.now())
        self._probe.note(self._clock.now())
        self._idle.note_use(self._clock.now())
        self._is_open, self._is_resting = True, False
        self._has_woken.set()
        self.closed = DRAINING if self._is_draining else None

    def _introduce(self, ready: Ready) -> None:
        self.model, self.memory, self.startup = ready.model, ready.memory, ready.startup
        self._requests.fingerprint = ready.model.fingerprint
        self.kv_endpoint, self.exchanges_kv = ready.kv_endpoint, ready.kv_endpoint is not None
        self.adapters.start(ready.adapters)

    async def _serve_until_broken(self) -> None:
        """Keeps an engine running: serves one engine after another."""
        try:
            while self._is_open or self._is_resting:
                if self._is_open:
                    await self._serve()
                    if self._is_resting:
                        await self._note_rest()
                if self._is_resting:
                    await self._wanted.wait()
                    await self._replace(is_wanted=True)
                else:
                    await self._close_engine()
                    await self._replace()
        except Exception as error:
            _logger.critical("the task that keeps %s running failed: %s", self.name, describe(error))
        finally:
            if self._is_open or self._is_resting:
                self._transport.kill()
                await self._close_engine()
            await self._transport.discard_template(is_final=True)
            if not self._is_draining:
                self.closed = self._fault = self._why_broken if self._replaces else self._transport.lost
                if self.rescue is not None:
                    self._requests.release(self.rescue, confined=True)
                self._requests.end_all(self._fault)

    async def _serve(self) -> None:
        """Dispatches the engine's messages until it ends; kills it when it hangs."""
        watch = asyncio.create_task(self._watch(), name="engine watchdog") if self._watches else None
        try:
            await self._transport.run(self.receive)
        finally:
            if watch is not None:
                watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._supervision.look_every_s)
            if self._probe.look(self._clock.now()):
                self._send(Ping())
            is_waited_for = (self._requests.is_waited_for or self._probe.is_open) and not self.adapters.is_loading
            self._watchdog.look(self._clock.now(), is_waited_for=is_waited_for)
            if self._requests.is_waited_for or self.adapters.is_loading:
                self._idle.note_use(self._clock.now())
            if self._idle.is_over(self._clock.now()) and self._supervision.restarts is not None:
                _logger.info("%s had no request for %g s and ends", self.name, self._supervision.idle_timeout_s)
                await self._end_idle_engine()
                return
            if self._watchdog.is_hung and self._supervision.restarts is not None:
                await self._report_hang()
                self.replace_engine()
                return

    async def _report_hang(self) -> None:
        _logger.error("%s made no step for %.1f s; it is replaced", self.name, self._watchdog.stalled_s)
        stack = await self.collect_stack()
        if self.diagnose is not None:
            await self.diagnose(stack)
        else:
            _logger.error("%s: %s", self.name, self._stacks.add(stack, 0))

    async def collect_stack(self) -> StackTrace:
        """Returns where the engine's step is at present; empty if that cannot be known."""
        return read_step_stack(await self._transport.collect_stacks()) if isinstance(self._transport, StackSource) else ()

    def replace_engine(self) -> None:
        """Kills the engine; another one is started, and continues what this one had."""
        self._transport.kill()

    async def _end_idle_engine(self) -> None:
        """Ends an engine without requests. Requests that come from now on wait for the next one."""
        self._send(Shutdown(0.0))
        self._is_open, self._is_resting = False, True
        self.kv_endpoint = None
        self._wanted.clear()
        self._has_woken.clear()
        self._has_rested.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_rested.wait(), STOP_GRACE_S)
            return
        self._transport.kill()

    async def _note_rest(self) -> None:
        """Cleans up after an idle engine."""
        await self._transport.close()
        self._requests.lose_engine()
        self._note_end()
        await self._transport.discard_template()
        self._has_rested.set()

    async def _close_engine(self) -> None:
        """Cleans up after an engine that has ended."""
        self.num_lost += not self._is_draining
        self._stop_accepting()
        how = await self._transport.close()
        self._note_end()
        num_kept, num_rescued, num_ended = self._let_go()
        if how is not None and not self._is_draining:
            fates = (
                f"of its requests {num_rescued} continue on other replicas, {num_kept} wait until an engine has started in its "
                f"place, {num_ended} end with an error"
            )
            _logger.error("%s is gone: %s; %s", self.name, how, fates)

    def _stop_accepting(self) -> None:
        can_replace = self._supervision.restarts is not None
        self._is_open = self._is_resting = False
        self._has_woken.set()
        self.kv_endpoint = None
        self._held_calls.clear()
        self.closed = DRAINING if self._is_draining else RESTARTING if can_replace else self._transport.lost
        if self.after_failure is not None:
            self.after_failure()

    def _note_end(self) -> None:
        if self.after_end is not None:
            self.after_end()

    def _let_go(self) -> tuple[int, int, int]:
        """Keeps the requests of an engine that has ended for the next one, has other clients adopt them, or ends them. Returns
        how many of each."""
        reply = DRAINING if self._is_draining else self._transport.lost
        num_requests, num_kept, num_rescued = len(self._requests), 0, 0
        can_go_on = self._supervision.restarts is not None or self.rescue is not None
        if can_go_on and not self._is_draining:
            is_carried = isinstance(self._transport, SealedWorkerTransport) and self._transport.is_carried
            num_kept = self._requests.keep_resumable(reply, is_dead=not is_carried, is_shared=not self._replaces)
            if self.rescue is not None:
                num_rescued = num_kept - self._requests.release(self.rescue, confined=not self._replaces)
        else:
            self._requests.end_all(reply)
        self.adapters.fail_all(reply)
        self._cache_calls.fail_all(reply)
        return num_kept - num_rescued, num_rescued, num_requests - num_kept

    async def _replace(self, *, is_wanted: bool = False) -> None:
        """Restarts the engine, or gives up permanently.

        Args:
            is_wanted: the last engine was idle, so this start does not count as a restart.
        """
        restarts = self._supervision.restarts
        while not (self._is_open or self._is_draining or self._is_given_up) and restarts is not None:
            delay_s = 0.0 if is_wanted else restarts.next_delay_s(self._clock.now())
            if delay_s is None:
                _logger.critical("%s: %d restarts in %.0f s: %s", self.name, restarts.max_restarts, restarts.window_s, BROKEN)
                return
            await asyncio.sleep(delay_s)
            try:
                await self._open()
            except CloisterError as error:
                if error.is_final:
                    _logger.critical("%s cannot be started again: %s", self.name, error.message)
                    self._why_broken = UNSTARTABLE
                    self._stop_accepting()
                    self.adapters.fail_all(UNSTARTABLE)
                    return
                if self._replaces:
                    _logger.error("%s did not start again: %s", self.name, error.message)
                self._stop_accepting()
                self.adapters.fail_all(RESTARTING)
                if self.rescue is not None:  # other replicas may accept what came while this one was idle
                    self._requests.release(self.rescue, confined=not self._replaces)
                is_wanted = False
                continue
            if not is_wanted and self._replaces:
                self.num_restarts += 1
                _logger.warning("%s runs again", self.name)
            calls, self._held_calls = self._held_calls, []
            for call in calls:
                self._send(call)
            self._send_due()
