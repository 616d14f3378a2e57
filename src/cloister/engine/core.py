"""The step loop of one replica: plan, run, check, commit.

Where steps overlap, step n + 1 is planned while a device computes step n, and starts before the tokens of step n are read.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from cloister.engine.adapters import AdapterRegister
from cloister.engine.cache_reports import describe_usage
from cloister.engine.channel import InputQueue
from cloister.engine.drafting import describe_drafting, measure, weigh
from cloister.engine.kv_transfer import KVBlocks, KVLinks, KVTransfer
from cloister.engine.memory_scrubber import MemoryScrubber
from cloister.engine.output_processor import OutputProcessor
from cloister.engine.step_ahead import StepAhead
from cloister.engine.thread_times import ThreadTimes
from cloister.kv import KVFormat
from cloister.scheduler import Scheduler
from cloister.text import Tokenizer
from cloister.types.clock import Clock, WallClock
from cloister.types.errors import ConfigError, EngineError
from cloister.types.events import (
    Abort,
    AdapterReply,
    CacheReply,
    CacheUsage,
    CancelPrefetch,
    Ended,
    Event,
    FrontMessage,
    HoldKV,
    InspectCache,
    LeasePrefix,
    LoadAdapter,
    Outputs,
    Ping,
    PrefetchKV,
    PrefixLeased,
    RenewPrefix,
    Shutdown,
    Stepped,
    Submit,
    UnloadAdapter,
)
from cloister.types.logs import describe
from cloister.types.request import COMPILE_LOOK_S, COMPILE_TIMEOUT_S, Grammar, ModelInfo, Request
from cloister.types.scope import Scope
from cloister.types.step import StepPlan, StepResult

if TYPE_CHECKING:
    from cloister.engine.kv_pool import PoolSeat
    from cloister.engine.kv_tiers import EngineTiers, TierMachine
    from cloister.executor.grammar import Grammars
    from cloister.executor.image_encoding import ImageEncoding

IDLE_WAIT_S: Final = 5.0
"""Longest sleep of an idle engine; a message wakes it."""
HEARTBEAT_S: Final = 0.25
"""The same while requests wait for a grammar, an image or KV; the engine then sends a message without events as a heartbeat."""
MAX_FAILURES_IN_ROW: Final = 3
STEP_FAILED: Final = "the engine failed while it computed this request; send it again"

_logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs plans."""

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineCore:
    """One replica, without the transport of its messages. Its state of a request is the scheduler's (`Scheduler.requests`),
    from the submit message until the last sequence ends.

    Args:
        scheduler: makes plans.
        runner: runs plans.
        output: converts tokens to text and detects the end of answers.
        model: the served model.
        memory: itemised budget, (what, bytes).
        startup: startup times, (phase, seconds).
        adapters: adapters that requests may use.
        grammars: compiles grammars in the background; None if requests cannot have grammars.
        encoding: encodes images beside the steps; None if requests cannot have images.
        scrubber: overwrites residue of ended requests; None leaves it until the memory is reused.
        ahead: overlaps planning with the device: holds the step that runs while the engine plans the next one and reads the
            tokens of the last one. None handles one step at a time.
        kv_blocks: copies blocks for other engines; None if the program cannot.
        thread_times: those of the engine's thread; None: they are not measured.

    Attributes:
        input_queue: receives the front's messages, from any thread.
        is_done: the engine has shut down and every request has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output: OutputProcessor,
        *,
        model: ModelInfo,
        memory: list[tuple[str, int]],
        startup: Sequence[tuple[str, float]] = (),
        clock: Clock | None = None,
        adapters: AdapterRegister | None = None,
        grammars: Grammars | None = None,
        encoding: ImageEncoding | None = None,
        scrubber: MemoryScrubber | None = None,
        ahead: StepAhead | None = None,
        kv_blocks: KVBlocks | None = None,
        thread_times: ThreadTimes | None = None,
    ) -> None:
        self.model = model
        self.memory = memory
        self.startup = list(startup)
        self.input_queue = InputQueue()
        self.is_done = False
        self.adapters = adapters or AdapterRegister()
        self._scheduler = scheduler
        self._runner = runner
        self._output = output
        self._clock = clock or WallClock()
        self._grammars = grammars
        self._encoding = encoding
        self._scrubber = scrubber
        self._ahead = ahead
        self._kv_blocks = kv_blocks
        self._thread_times = thread_times
        self._transfer: KVTransfer | None = None
        self._tiers: EngineTiers | None = None
        self._cache_replies: list[CacheReply] = []
        self._is_pinged = False
        self._drain_by_s: float | None = None
        self._num_failures = 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, for other users in this process."""
        return self._output.tokenizer

    @property
    def kv_endpoint(self) -> str | None:
        """Where other engines load KV from this one; None if they cannot."""
        return None if self._transfer is None else self._transfer.links.endpoint

    def exchange_kv(self, make_links: Callable[[KVFormat], KVLinks], *, of_requests_only: bool = False) -> None:
        """Lets this engine give cached KV to others and load theirs. Call it before the first request.

        Args:
            make_links: returns connections to other engines with this format.
            of_requests_only: others get only KV of requests that are here or continued elsewhere.

        Raises:
            ConfigError: the program cannot.
        """
        if self._kv_blocks is None:
            raise ConfigError("this back end cannot export KV; leave kv_transfer out, or compute on a CPU", param="kv_transfer")
        self._scheduler.kv_exports.of_requests_only = of_requests_only
        self._transfer = KVTransfer(self._scheduler, self._kv_blocks, make_links(self._kv_blocks.form))

    def open_kv_tiers(
        self,
        setting: str,
        pool: tuple[int, PoolSeat] | None = None,
        codec: str | None = None,
        admission: str | None = None,
        machine: TierMachine | None = None,
    ) -> None:
        """Lets this engine keep evicted KV below the device. Call it before the first request, and in the process that runs it.

        Args:
            setting: `kv_tier`: one tier or several.
            codec: `kv_tier_codec`: how they compress KV.
            admission: `kv_tier_admission`: which blocks full ones store.
            pool: descriptor of the memory that engines share, and this one's seat.
            machine: where it runs; None: this machine.

        Raises:
            ConfigError: a tier cannot be used, or the program cannot export KV, or it cannot be compressed.
        """
        if self._kv_blocks is None:
            raise ConfigError("this back end cannot export KV; leave kv_tier out, or compute on a CPU", param="kv_tier")
        from cloister.engine.kv_tier_storage import parse_tiers  # only when it was asked for: it imports cryptography
        from cloister.engine.kv_tiers import EngineTiers, TierMachine

        self._tiers = EngineTiers(
            self._scheduler, self._kv_blocks, parse_tiers(setting), pool, codec, admission, machine or TierMachine()
        )

    def disable_overlap(self) -> None:
        """Disables overlapping steps, to measure the parts of a step. No step may be running."""
        self._ahead = None

    def freeze_gc_heap(self) -> None:
        """Excludes all loaded objects from garbage collection (`MemoryScrubber.freeze_gc_heap`). Call it before the first
        request."""
        if self._scrubber is not None:
            self._scrubber.freeze_gc_heap()

    def run(self, emit: Callable[[Outputs], None]) -> None:
        """Runs steps until shutdown; calls `emit` with the message of each step.

        Raises:
            EngineError: too many steps in a row failed.
        """
        if self._encoding is not None:
            self._encoding.on_done(self.input_queue.wake)
        if self._transfer is not None:
            self._transfer.links.on_news(self.input_queue.wake)
        if self._tiers is not None:
            self._tiers.on_news(self.input_queue.wake)
        try:
            while not self.is_done:
                outputs = self.step(emit)
                if self._transfer is not None:
                    self._transfer.offer_news(self._clock.now())  # before the front hears of the step
                if outputs is not None:
                    emit(outputs)
                elif not self.is_done:
                    self.input_queue.wait(self.patience_s())
                    if self.waits_for_others:
                        emit(Outputs([], []))
        finally:
            if self._tiers is not None:
                self._tiers.close()

    def step(self, emit: Callable[[Outputs], None] | None = None) -> Outputs | None:
        """Reads the input_queue and runs one step; returns None if there was nothing to do.

        Args:
            emit: called with arrivals and refusals before the step runs, so that they are known even if the step hangs; None
                includes them in the step's message.

        Raises:
            EngineError: too many steps in a row failed.
        """
        if self._num_failures >= MAX_FAILURES_IN_ROW:
            raise EngineError(f"{MAX_FAILURES_IN_ROW} steps in a row failed")
        now = self._clock.now()
        for message in self.input_queue.take():
            self._read(message, now, emit)
        if self._scheduler.waiting_for_grammar:
            self._release_compiled(now)
        if self._encoding is not None and self._encoding.done:
            for image in self._encoding.take():
                self._scheduler.note_encoded(image, now)
        if self._drain_by_s is not None and now >= self._drain_by_s:
            for request_id in list(self._scheduler.requests):
                self._scheduler.abort(request_id, now)
        if self._transfer is not None:
            self._transfer.serve(now)
        if self._tiers is not None:
            self._tiers.serve(now)
        if self._ahead is None:
            plan, next_plan = self._scheduler.plan(now), None
        else:
            plan, next_plan = self._plan_ahead(self._ahead, now)
        if self._transfer is not None:
            self._transfer.dispatch()
        if self._tiers is not None:
            self._tiers.dispatch()
        if plan is not None and emit is not None and (early := self._collect(self._scheduler.take_events())) is not None:
            emit(early)
        outputs = self._collect(self._perform(plan, next_plan) if plan is not None else self._scheduler.take_events())
        if self._scrubber is not None:
            self._scrubber.tidy(now, is_idle=plan is None)
        self.is_done = self._drain_by_s is not None and plan is None and not self._scheduler.requests
        return outputs

    def _collect(self, events: list[Event]) -> Outputs | None:
        """Builds the message with all new events; None if there are none."""
        for event in events:
            if isinstance(event, Ended) and event.last:
                self._clear_up()
        replies: list[AdapterReply | CacheReply | PrefixLeased] = [*self.adapters.replies, *self._cache_replies]
        if self._scheduler.prefix_leases.news:
            replies += self._scheduler.prefix_leases.take_news()
        self.adapters.replies, self._cache_replies = [], []
        answers = self._scheduler.take_answers() if self._scheduler.answers else ()
        if not (events or replies or self._is_pinged):
            return None
        self._is_pinged = False
        return Outputs(self._output.collect(events, self._scheduler.requests, answers), events, replies)

    def _clear_up(self) -> None:
        """Drops state that only ended requests used."""
        if self.adapters.leaving:
            self.adapters.free_unused(self._used_adapters())
        if self._scrubber is not None:
            self._scrubber.note_end()

    def _used_adapters(self) -> set[str | None]:
        return {state.request.adapter for state in self._scheduler.requests.values()}

    def _read(self, message: FrontMessage, now: float, emit: Callable[[Outputs], None] | None) -> None:
        match message:
            case Submit():
                self._admit(message, now)
            case Abort(request_id):
                self._scheduler.abort(request_id, now)
            case HoldKV(request_id, hold_s):
                self._scheduler.hold(request_id, hold_s, now)
            case PrefetchKV():
                if self._transfer is None:
                    self._scheduler.kv_loads.refuse(message.request.request_id, now)
                else:
                    self._transfer.prefetch(message, now)
            case CancelPrefetch(request_id):
                self._scheduler.kv_loads.cancel_prefetch(request_id, now)
            case LeasePrefix():
                self._lease_prefix(message, now)
            case RenewPrefix(name, lease_s):
                self._scheduler.prefix_leases.renew(name, lease_s, now)
            case LoadAdapter() | UnloadAdapter():
                if self._ahead is not None:
                    self._ahead.pause()
                self.adapters.read(message, self._used_adapters(), self._make_heartbeat(emit, now))
            case InspectCache(call_id, scope, drop):
                places = self._report_cache(scope, now)
                if drop:
                    self._scheduler.forget(scope, now)
                self._cache_replies.append(CacheReply(call_id, places))
            case Ping():
                self._is_pinged = True
            case Shutdown(timeout_s):
                self._drain_by_s = now + timeout_s

    def _make_heartbeat(self, emit: Callable[[Outputs], None] | None, now: float) -> Callable[[], None]:
        """Returns a callback to call during long work between two steps, such as a load from a slow disk, so that the front
        does not think that the engine hangs."""
        told_s = now

        def beat() -> None:
            nonlocal told_s
            if emit is not None and self._clock.now() - told_s >= HEARTBEAT_S:
                told_s = self._clock.now()
                emit(Outputs([], []))

        return beat

    def _lease_prefix(self, message: LeasePrefix, now: float) -> None:
        leases = self._scheduler.prefix_leases
        if self._transfer is None:
            leases.refuse(message.name)
            return
        if message.source is not None:
            self._transfer.load_from(message.name, message.source)
        leases.lease(message.request, message.lease_s, now, is_copy=message.source is not None)

    def _report_cache(self, scope: Scope, now: float) -> list[CacheUsage]:
        pool = self._scheduler.pool
        if self._kv_blocks is not None:
            sizes = self._kv_blocks.form.sizes
        else:  # a program that cannot export blocks has one group of them
            sizes = (dict(self.memory).get("KV cache", 0) // pool.num_total,) * pool.num_groups
        return [describe_usage(place, kept, sizes, pool.block_size, now) for place, kept in self._scheduler.report_kept(scope)]

    def _admit(self, submitted: Submit, now: float) -> None:
        request = submitted.request
        seed = secrets.randbits(63) if submitted.seed is None else submitted.seed
        grammar = request.sampling.grammar
        grammar_deadline_s = None if grammar is None or self._is_compiled(request) else now + COMPILE_TIMEOUT_S
        refusal = None if request.adapter is None else self.adapters.find_refusal(request.adapter)
        loads_kv = submitted.kv_source is not None and self._transfer is not None
        if submitted.kv_source is not None and self._transfer is not None:
            self._transfer.load_from(request.request_id, submitted.kv_source)
        self._scheduler.add(
            request,
            now,
            seed=seed,
            refusal=refusal,
            grammar_deadline_s=grammar_deadline_s,
            resumption=submitted.resumption,
            loads_kv=loads_kv,
            hold_kv_s=submitted.hold_kv_s,
            prefill_only=submitted.prefill_only,
        )
        if submitted.kv_source is not None and self._transfer is None:
            self._scheduler.kv_loads.refuse(request.request_id, now)

    def _is_compiled(self, request: Request) -> bool:
        """Whether a request need not wait for its grammar. Otherwise starts to compile it, and wakes the engine when that is
        done."""
        grammar = request.sampling.grammar
        if self._grammars is None or grammar is None:
            return True
        return self._grammars.prepare(grammar, self.input_queue.wake, request.tenant)

    def _release_compiled(self, now: float) -> None:
        """Releases requests whose grammar is compiled, and fails those that have waited too long."""
        assert self._grammars is not None
        self._grammars.resume(self._list_grammars)
        for state in list(self._scheduler.waiting_for_grammar.values()):
            grammar, is_late = state.request.sampling.grammar, now >= state.grammar_deadline_s
            assert grammar is not None
            if (is_late and self._grammars.give_up(grammar)) or self._is_compiled(state.request):
                self._scheduler.release(state)
            elif is_late:
                state.grammar_deadline_s = now + COMPILE_LOOK_S

    def _list_grammars(self) -> list[Grammar]:
        states = self._scheduler.requests.values()
        return [state.request.sampling.grammar for state in states if state.request.sampling.grammar is not None]

    def _plan_ahead(self, ahead: StepAhead, now: float) -> tuple[StepPlan | None, StepPlan | None]:
        """Returns the step on the device, started here if none was, and the next one, planned meanwhile."""
        try:
            if ahead.plan is None and (plan := self._plan(now)) is not None:
                ahead.start(plan)
            next_plan = None if ahead.plan is None else self._plan(now)
        except Exception as error:
            self._recover(error)
            next_plan = None
        return ahead.plan, next_plan

    def _plan(self, now: float) -> StepPlan | None:
        """Plans a step. Its answers are prepared before it runs, because they may end while it runs."""
        plan = self._scheduler.plan(now)
        if plan is not None:
            self._output.begin(plan)
        return plan

    def _wait(self, ahead: StepAhead, next_plan: StepPlan | None) -> StepResult:
        """Waits for the step on the device, then starts the next one there."""
        result = ahead.wait()
        if next_plan is not None:
            ahead.start(next_plan)
        return result

    def _perform(self, plan: StepPlan, next_plan: StepPlan | None) -> list[Event]:
        try:
            if self._ahead is None:
                if plan.arrivals or plan.forks:
                    self._output.begin(plan)
                result = self._runner.run(plan)
            else:
                result = self._wait(self._ahead, next_plan)
            stops = self._output.check(plan, result)
        except Exception as error:
            self._recover(error)
            return self._scheduler.take_events()
        self._num_failures = 0
        now = self._clock.now()
        if self._tiers is not None:
            self._tiers.note_step(self._scheduler.owners_of(plan))
        events = self._scheduler.commit(result, stops, now)
        return [*events, self._stepped(plan, result, now)]

    def _recover(self, error: Exception) -> None:
        """Ends the requests of a failed step and of the step planned after it; other requests continue."""
        self._num_failures += 1
        _logger.error("a step failed: %s", describe(error))
        if self._ahead is not None:
            self._ahead.drop()  # it writes blocks that other requests could get as soon as its requests have ended
        self._scheduler.fail(STEP_FAILED, self._clock.now())

    def _stepped(self, plan: StepPlan, result: StepResult, now: float) -> Stepped:
        pool, held = self._scheduler.pool, self._scheduler.held_searches
        drafting = describe_drafting(plan, result) if result.draft_s else ()
        num_tokens, num_attended = plan.num_tokens, plan.num_attended
        gained_s = spent_s = 0.0
        if drafting:
            num_tokens, num_attended = measure(plan, result)
            gained_s, spent_s = weigh(drafting, plan, result, self._scheduler.cost)
        processor_s, starved_s = (0.0, 0.0) if self._thread_times is None else self._thread_times.take(now)
        return Stepped(
            now_s=now,
            elapsed_s=result.elapsed_s,
            num_tokens=num_tokens,
            num_samples=len(result.samples),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_held=len(held) if held else 0,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_total_blocks=pool.num_total,
            num_attended=num_attended,
            drafting=drafting,
            gained_s=gained_s,
            spent_s=spent_s,
            stored=() if self._tiers is None else self._tiers.take_stored(now),
            sampling_s=result.sampling_s,
            num_scored=sum(map(len, result.prompt_logprobs.values())) if result.prompt_logprobs else 0,
            processor_s=processor_s,
            starved_s=starved_s,
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether requests wait for a grammar that is compiled, an image that is encoded, or KV that is loaded, beside the
        steps."""
        is_encoding = self._encoding is not None and self._encoding.is_busy
        return bool(self._scheduler.waiting_for_grammar or len(self._scheduler.kv_loads)) or is_encoding

    def patience_s(self) -> float:
        """How long to wait for a message: until the next deadline, within a limit."""
        waiting = self._scheduler.waiting_for_grammar.values()
        known = (self._scheduler.next_deadline_s, self._drain_by_s, *(state.grammar_deadline_s for state in waiting))
        deadlines = [d for d in known if d is not None]
        longest_s = HEARTBEAT_S if self.waits_for_others else IDLE_WAIT_S
        return max(0.0, min([longest_s, *(d - self._clock.now() for d in deadlines)]))
